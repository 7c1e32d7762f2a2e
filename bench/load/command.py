"""`python -m bench load`: run a load, write its report."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import trio
from attrs import asdict

from bench.load import measure, options, report
from bench.load.messages import Record
from bench.load.process import Failed, Run, split_job
from bench.rig.result import write

DESCRIPTION = options.DESCRIPTION
NOTHING_MEASURED = 1
LINE_EVERY_S = 10.0

add = options.add


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a load; return 0, or 1 if no request completed or a worker died; a wrong command line exits with 2."""
    try:
        job = options.read(arguments)
    except options.Mistake as mistake:
        parser.error(str(mistake))
    begun = datetime.now(UTC)
    run = Run(split_job(job, arguments.processes))
    failed: BaseExceptionGroup[BaseException] | None = None
    try:
        trio.run(_run, run, arguments.quiet, strict_exception_groups=True)
    except* (Failed, KeyboardInterrupt) as group:
        failed = group
    if failed is not None:
        print(f"bench load: {_first(failed)!r}", file=sys.stderr)
        return NOTHING_MEASURED
    if arguments.raw is not None:
        with arguments.raw.open("wb") as raw:
            raw.writelines(msgspec.json.encode(_plain(record)) + b"\n" for record in run.records)
    document = report.document(job, run, words, begun)
    if arguments.json == Path("-"):
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        if arguments.json is not None:
            write(arguments.json, document)
        print(report.text(document))
    return 0 if measure.completed(run.records) else NOTHING_MEASURED


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _run(run: Run, quiet: bool) -> None:
    async with trio.open_nursery() as helpers:
        helpers.start_soon(_stop_on_signal, run)
        if not quiet:
            helpers.start_soon(_show, run)
        await run.run()
        helpers.cancel_scope.cancel(reason="the run is over")


async def _show(run: Run) -> None:
    """Print now and then for how long the load has been running."""
    while True:
        await trio.sleep(LINE_EVERY_S)
        state = "warming up" if run.start_at is None else f"running for {run.clock() - run.start_at:.0f} s"
        print(f"{state}; Ctrl-C ends the run with the results so far", file=sys.stderr, flush=True)


async def _stop_on_signal(run: Run) -> None:
    """End the run at the first signal, with the results so far; abort it at the second."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if run.stopped:
                raise KeyboardInterrupt
            run.stop()


def _plain(record: Record) -> dict[str, object]:
    """Return a record with its times as a list of numbers."""
    return asdict(record) | {"stamps": list(measure.stamps(record))}
