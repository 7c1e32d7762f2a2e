"""`python -m bench load`: run a load, write its report."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import trio
from attrs import asdict

from bench.load import measure, report, values
from bench.load.messages import PATHS, Job, Record, Target
from bench.load.plan import Pace, Workload
from bench.load.process import Failed, Run, split_job
from bench.load.requests import parse_url
from bench.rig.result import write

DESCRIPTION = """\
Send streaming requests to an OpenAI-compatible server, by Responses over a WebSocket or by server-sent events, and
measure its answers. Each of --clients N sends its next request when its last answer has ended."""
NOTHING_MEASURED = 1
LINE_EVERY_S = 10.0
PROCESSES_MAX = 256
CLIENTS = 16
REQUESTS = 100


def add(parser: argparse.ArgumentParser) -> None:
    """Add a load's arguments to a parser."""
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="the server's root, its /v1, or an endpoint")
    server.add_argument("--api", choices=sorted(PATHS), default="chat", help="default: chat")
    server.add_argument("--model", required=True)
    server.add_argument("--key", help="bearer token; default: $OPENAI_API_KEY")
    requests = parser.add_argument_group("requests")
    for name, words in (("prompt", "roughly"), ("output", "at most")):
        requests.add_argument(
            f"--{name}-tokens", type=values.count, default=128, metavar="N", help=f"{words}; default: 128"
        )
    requests.add_argument("--ignore-eos", action="store_true", help="request answers of exactly that length")
    requests.add_argument(
        "--seed", type=int, default=0, help="a server that has seen the same seed has the prompts cached"
    )
    pace = parser.add_argument_group("pace")
    pace.add_argument("--clients", type=values.count, default=CLIENTS, help=f"default: {CLIENTS}")
    pace.add_argument("--requests", type=values.count, help=f"default: {REQUESTS}, unless there is a duration")
    pace.add_argument(
        "--duration", type=values.positive, metavar="S", help="send for this long, then wait for the running requests"
    )
    pace.add_argument(
        "--warmup", type=values.whole, default=0, metavar="N", help="requests before the start, not counted"
    )
    output = parser.add_argument_group("processes and output")
    output.add_argument("--processes", type=values.count, default=1, help="that share the load; default: 1")
    output.add_argument("--json", type=Path, metavar="FILE", help="write every figure as one document")
    output.add_argument("--raw", type=Path, metavar="FILE", help="write every request and its times as a JSON line")
    output.add_argument("--quiet", action="store_true", help="print nothing before the end")


def read(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Job:
    """Return the load of a parsed command line; a wrong one exits with 2."""
    try:
        parse_url(arguments.url, arguments.api)
    except (ValueError, UnicodeError) as error:
        parser.error(f"--url: {error}")
    if arguments.processes > min(arguments.clients, PROCESSES_MAX):
        parser.error(f"--processes must be at most {PROCESSES_MAX}, and no more than the {arguments.clients} clients")
    requests = arguments.requests
    if requests is None and arguments.duration is None:
        requests = REQUESTS
    return Job(
        target=Target(
            url=arguments.url,
            api=arguments.api,
            model=arguments.model,
            key=arguments.key if arguments.key is not None else os.environ.get("OPENAI_API_KEY"),
            ignore_eos=arguments.ignore_eos,
        ),
        workload=Workload(
            seed=arguments.seed, prompt_tokens=arguments.prompt_tokens, output_tokens=arguments.output_tokens
        ),
        pace=Pace(clients=arguments.clients, requests=requests, duration_s=arguments.duration, warmup=arguments.warmup),
    )


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a load; return 0, or 1 if no request completed or a worker died; a wrong command line exits with 2."""
    job = read(parser, arguments)
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
