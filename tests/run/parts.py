"""The parts of a run of the tests: each is a word of the Makefile, run in a process group of its own.

The parts of a stage run beside each other, a limited number at a time. In a part whose tests depend on real time, a test
that failed is run once more, alone: on a busy machine such a test may fail for want of processor time.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from pathlib import Path

import trio
from attrs import evolve, frozen

from tests.run.outcomes import Result, read_record

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"))
END_S = 60.0
"""The seconds that a part may take to end after an interrupt, before it is killed."""
RETRIED_MAX = 10
"""The most failed tests of a part that are run again; more are no accident."""


@frozen
class Part:
    """One part of a run: a command, by default the Makefile's word of the same name."""

    name: str
    command: tuple[str, ...] = ()
    is_realtime: bool = False  # a test that failed is run once more, alone
    in_background: bool = False  # it has the processor time that the others leave

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line."""
        command = self.command or ("make", "--no-print-directory", self.name)
        return ("nice", "-n", "19", *command) if self.in_background else command


@frozen
class Stage:
    """Parts that run beside each other, begun in their order, at most `at_once` at a time."""

    parts: tuple[Part, ...]
    at_once: int = 1


async def run_stages(stages: Iterable[Stage], folder: Path) -> list[Result]:
    """Run stages one after another, print a line for each part as it ends, and return the results.

    Args:
        stages: What is run.
        folder: Where the parts' logs and outcomes are written.
    """
    results: list[Result] = []
    for stage in stages:
        limit = trio.CapacityLimiter(stage.at_once)
        of_stage: list[Result] = []
        async with trio.open_nursery() as nursery:
            for part in stage.parts:
                await limit.acquire_on_behalf_of(part)
                nursery.start_soon(_run_and_report, part, folder, limit, of_stage)
        # A failed test has the machine to itself only once all parts of its stage have ended.
        realtime = {part.name for part in stage.parts if part.is_realtime}
        results += [await retried(result, folder) if result.part in realtime else result for result in of_stage]
    return results


async def _run_and_report(part: Part, folder: Path, limit: trio.CapacityLimiter, results: list[Result]) -> None:
    print(f"{part.name} ...", flush=True)
    result = await run_part(part, folder)
    limit.release_on_behalf_of(part)
    print(result.line, flush=True)
    if result.returncode:
        print(excerpt(result.log), flush=True)
    results.append(result)


async def run_part(part: Part, folder: Path) -> Result:
    """Run one part in a process group of its own and return its result.

    A cancellation interrupts the whole group, waits for its end, and then kills it.
    """
    log, record = folder / f"{part.name}.log", folder / part.name
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir()
    recorded = f"-p tests.run.recorder --record {shlex.quote(str(record))}"
    environment = os.environ | {"PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} {recorded}"}
    begun = trio.current_time()
    with log.open("wb") as output:
        done = await trio.run_process(
            part.arguments,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
            start_new_session=True,
            deliver_cancel=interrupt,
        )
    seconds = trio.current_time() - begun
    status, outcomes = read_record(record)
    return Result(part.name, status or done.returncode, seconds, log, outcomes)


async def interrupt(process: trio.Process) -> None:
    """Interrupt a process group as Ctrl-C does, wait for its end, and kill it if it does not come."""
    os.killpg(process.pid, signal.SIGINT)
    with trio.move_on_after(END_S):
        await process.wait()
        return
    os.killpg(process.pid, signal.SIGKILL)


async def retried(result: Result, folder: Path) -> Result:
    """Run the failed tests of a part once more, alone, and return the result with those that passed as flaky."""
    failed = result.failed
    if result.returncode != 1 or not 0 < len(failed) <= RETRIED_MAX:
        return result
    print(f"{result.part}: {len(failed)} failed; alone once more ...", flush=True)
    again = await run_part(Part(f"{result.part}-again", (*PYTEST, *failed)), folder)
    if again.returncode:
        print(excerpt(again.log), flush=True)
    passed = {each.test for each in again.outcomes if each.kind == "passed"}
    return evolve(result, flaky=[test for test in failed if test in passed])


def excerpt(log: Path, lines_max: int = 300) -> str:
    """Return what a log has of failures, or else its end."""
    lines = log.read_text(errors="replace").splitlines()
    begin = next((number for number, line in enumerate(lines) if line.strip("= ") in {"FAILURES", "ERRORS"}), None)
    shown = lines[-60:] if begin is None else lines[begin:]
    return "\n".join(shown[-lines_max:])


async def _end_on_a_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for number in signals:
        if scope.cancel_called:
            os._exit(128 + number)
        print("ending ...", flush=True)
        scope.cancel()


def run_to_the_end(stages: Sequence[Stage], folder: Path) -> list[Result] | None:
    """Run stages; return their results, or None if SIGINT or SIGTERM ended the run. A second signal ends it at once."""
    folder.mkdir(parents=True, exist_ok=True)
    return trio.run(partial(_until_a_signal, stages, folder))


async def _until_a_signal(stages: Sequence[Stage], folder: Path) -> list[Result] | None:
    results: list[Result] | None = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_on_a_signal, signals, nursery.cancel_scope)
            results = await run_stages(stages, folder)
            nursery.cancel_scope.cancel()
    return results
