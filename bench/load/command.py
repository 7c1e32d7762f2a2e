"""`python -m bench load`: run a load, show its progress, write its report."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import trio
from attrs import asdict, evolve

from bench.load import measure, options, plan, report
from bench.load.messages import Job, Record
from bench.load.options import Mistake, Options
from bench.load.process import Run, WorkerDied, split_job
from bench.load.progress import Bar
from bench.report.page import page
from bench.rig.result import about, as_result, write

DESCRIPTION = options.DESCRIPTION
NOTHING_MEASURED = 1

add = options.add


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a load; return 0, or 1 if no request completed or a worker died; a wrong command line exits with 2."""
    try:
        chosen = options.read(arguments)
    except Mistake as mistake:
        parser.error(str(mistake))
    begun = datetime.now(UTC)
    run = Run(split_job(chosen.job, chosen.processes))
    failed: BaseExceptionGroup[BaseException] | None = None
    try:
        trio.run(_run, run, chosen, strict_exception_groups=True)
    except* (WorkerDied, KeyboardInterrupt) as group:
        failed = group
    if failed is not None:
        print(f"bench load: {_first(failed)!r}", file=sys.stderr)
        return NOTHING_MEASURED
    findings = report.Findings(
        job=chosen.job,
        processes=chosen.processes,
        records=sorted(run.records, key=lambda record: record.number),
        done=list(run.done.values()),
        lags_s=run.lags_s,
        warmup_faults=run.warmup_faults,
        stopped=run.stopped,
        about=about(("load", *_masked(words, chosen.job)), begun),
    )
    _write(findings, chosen)
    return 0 if any(record.ending != "failed" for record in findings.records) else NOTHING_MEASURED


def _masked(words: Sequence[str], job: Job) -> list[str]:
    return [report.SECRET if job.target.key and job.target.key in word else word for word in words]


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _run(run: Run, chosen: Options) -> None:
    pace, requests = chosen.job.pace, plan.planned_requests(chosen.job.pace, chosen.job.workload)
    async with trio.open_nursery() as helpers:
        helpers.start_soon(_stop_on_signal, run)
        if not chosen.quiet:
            helpers.start_soon(Bar(run, evolve(pace, requests=requests), sys.stderr).show)
        await run.run()
        helpers.cancel_scope.cancel(reason="the run is over")


async def _stop_on_signal(run: Run) -> None:
    """End the run at the first signal, with the results so far; abort it at the second."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if run.stopped:
                raise KeyboardInterrupt
            run.stop()


def _write(findings: report.Findings, chosen: Options) -> None:
    if chosen.raw is not None:
        with chosen.raw.open("wb") as raw:
            for record in findings.records:
                raw.write(msgspec.json.encode(_plain(record)) + b"\n")
    document = report.document(findings)
    if chosen.html is not None:
        result = as_result(document)
        chosen.html.write_text(page([result], result.title))
    if chosen.json is None:
        print(report.table(findings))
        return
    if chosen.json == Path("-"):
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    write(chosen.json, document)
    print(report.table(findings))


def _plain(record: Record) -> dict[str, object]:
    """Return a record with its times as lists of numbers."""
    return asdict(record) | {"stamps": list(measure.stamps(record)), "weights": list(measure.weights(record))}
