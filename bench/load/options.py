"""The command line of a load, parsed into a `Job`; contradictory options are refused by name."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import msgspec
from attrs import frozen

from bench.load.messages import PATHS, Job, Target
from bench.load.plan import Pace, Prompt, Span, Workload
from bench.load.requests import parse_url

PROCESSES_MAX = 256
CLIENTS_DEFAULT = 16
REQUESTS_DEFAULT = 100

DESCRIPTION = """\
Send requests to an OpenAI-compatible server and measure its answers. Closed loop: --clients N, each of which sends its
next request when its last answer has ended. Open loop: --rate R, a Poisson process that waits for nobody."""


class Mistake(Exception):
    """The command line cannot be carried out, and why."""


@frozen(kw_only=True)
class Options:
    """The parsed command line."""

    job: Job
    processes: int
    json: Path | None
    raw: Path | None
    quiet: bool


def add(parser: argparse.ArgumentParser) -> None:
    """Add a load's arguments to a parser."""
    _add_server_and_requests(parser)
    _add_pace_and_output(parser)


def _add_server_and_requests(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="the server's root, its /v1, or an endpoint")
    server.add_argument("--api", choices=sorted(PATHS), default="chat", help="default: chat")
    server.add_argument("--model", required=True)
    server.add_argument("--key", help="bearer token; default: $OPENAI_API_KEY")
    server.add_argument("--timeout-s", type=_positive, default=600.0, help="of one request; default: 600")
    server.add_argument("--connections-a-client", choices=["reuse", "new"], default="reuse")
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--prompt-tokens", type=_span, default=Span(128, 128), metavar="N|A:B", help="roughly; default: 128"
    )
    requests.add_argument(
        "--output-tokens", type=_span, default=Span(128, 128), metavar="N|A:B", help="at most; default: 128"
    )
    requests.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines {"prompt": ..., "max_tokens": ...}')
    requests.add_argument("--ignore-eos", action="store_true", help="request answers of exactly that length")
    requests.add_argument("--temperature", type=_temperature, default=0.0, metavar="T|default", help="default: 0")
    requests.add_argument(
        "--running-usage", action="store_true", help="request usage with every event, if the server supports it"
    )
    requests.add_argument(
        "--extra-body", type=_object, default="{}", metavar="JSON", help="more fields for each request"
    )
    requests.add_argument(
        "--seed", type=int, default=0, help="a server that has seen the same seed has the prompts cached"
    )


def _add_pace_and_output(parser: argparse.ArgumentParser) -> None:
    pace = parser.add_argument_group("pace")
    loop = pace.add_mutually_exclusive_group()
    loop.add_argument("--clients", type=_count, help=f"closed loop; default: {CLIENTS_DEFAULT}")
    loop.add_argument("--rate", type=_positive, help="open loop, requests a second")
    pace.add_argument("--think-s", type=_at_least_zero, default=0.0, help="closed loop: pause before the next request")
    pace.add_argument("--concurrency-max", type=_count, help="open loop: delay requests beyond it")
    pace.add_argument("--requests", type=_count, help=f"default: {REQUESTS_DEFAULT}, unless there is a duration")
    pace.add_argument(
        "--duration", type=_positive, metavar="S", help="send for this long, then wait for the running requests"
    )
    pace.add_argument("--warmup", type=_whole, default=0, metavar="N", help="requests before the start, not counted")
    leave = parser.add_argument_group("early disconnects")
    leave.add_argument(
        "--cancel-rate",
        type=_fraction,
        default=0.0,
        help="share of requests whose client disconnects early, 0 to 1: half "
        "of them before the first token, the others after a random number of tokens",
    )
    leave.add_argument(
        "--cancel-within-s",
        type=_at_least_zero,
        default=0.5,
        help="disconnects before the first token happen after a thousandth of this to all of it, evenly over orders "
        "of magnitude, or at that token; default: 0.5",
    )
    leave.add_argument(
        "--cancel-by", choices=["close", "event"], default="close", help="event: response.cancel, responses-ws only"
    )
    output = parser.add_argument_group("processes and output")
    output.add_argument("--processes", type=_count, default=1, help="that share the load; default: 1")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure as one document; - is standard output"
    )
    output.add_argument("--raw", type=Path, metavar="FILE", help="write every request as a JSON line")
    output.add_argument("--quiet", action="store_true", help="show no progress")


def read(arguments: argparse.Namespace) -> Options:
    """Return the options of a parsed command line; raises `Mistake`."""
    try:
        parse_url(arguments.url, arguments.api)
    except (ValueError, UnicodeError) as error:
        raise Mistake(f"--url: {error}") from error
    job = Job(target=_target(arguments), workload=_workload(arguments), pace=_pace(arguments))
    if not 1 <= arguments.processes <= PROCESSES_MAX:
        raise Mistake(f"--processes must be from 1 to {PROCESSES_MAX}")
    together = job.pace.clients or job.pace.concurrency_max
    if together is not None and arguments.processes > together:
        raise Mistake(f"--processes {arguments.processes} cannot share {together} clients: some would have none")
    return Options(
        job=job, processes=arguments.processes, json=arguments.json, raw=arguments.raw, quiet=arguments.quiet
    )


def _target(arguments: argparse.Namespace) -> Target:
    if arguments.cancel_by == "event" and arguments.api != "responses-ws":
        raise Mistake("--cancel-by event needs --api responses-ws: other APIs have no such event")
    if arguments.running_usage and arguments.api not in {"chat", "completions"}:
        raise Mistake("--running-usage needs --api chat or completions")
    return Target(
        url=arguments.url,
        api=arguments.api,
        model=arguments.model,
        key=arguments.key if arguments.key is not None else os.environ.get("OPENAI_API_KEY"),
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        running_usage=arguments.running_usage,
        extra=arguments.extra_body,
        timeout_s=arguments.timeout_s,
        reuse=arguments.connections_a_client == "reuse",
        cancel_by=arguments.cancel_by,
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        seed=arguments.seed,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        prompts=() if arguments.prompts is None else prompts(arguments.prompts),
        cancel_rate=arguments.cancel_rate,
        cancel_within_s=arguments.cancel_within_s,
    )


def _pace(arguments: argparse.Namespace) -> Pace:
    if arguments.rate is None and arguments.concurrency_max is not None:
        raise Mistake("--concurrency-max needs --rate; a closed loop has its --clients")
    if arguments.rate is not None and arguments.think_s:
        raise Mistake("--think-s needs --clients; an open loop waits for nobody")
    return Pace(
        clients=None if arguments.rate is not None else arguments.clients or CLIENTS_DEFAULT,
        think_s=arguments.think_s,
        rate=arguments.rate,
        concurrency_max=arguments.concurrency_max,
        requests=REQUESTS_DEFAULT if arguments.requests is None and arguments.duration is None else arguments.requests,
        duration_s=arguments.duration,
        warmup=arguments.warmup,
    )


def prompts(path: Path) -> tuple[Prompt, ...]:
    """Read a prompts file; raises `Mistake` with the line that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise Mistake(f"--prompts: {error}") from error
    entries = tuple(_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not entries:
        raise Mistake(f"--prompts: {path} is empty")
    return entries


def _prompt(line: str, where: str) -> Prompt:
    try:
        document = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise Mistake(f"--prompts: {where}: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("prompt"), str):
        raise Mistake(f"--prompts: {where}: must be an object with a text `prompt`")
    if unknown := sorted(set(document) - {"prompt", "max_tokens"}):
        raise Mistake(f"--prompts: {where}: unknown: {', '.join(unknown)}")
    tokens_max = document.get("max_tokens")
    if tokens_max is not None and (not isinstance(tokens_max, int) or isinstance(tokens_max, bool) or tokens_max < 1):
        raise Mistake(f"--prompts: {where}: max_tokens must be a whole number from 1 on")
    return Prompt(document["prompt"], tokens_max)


# Values -----------------------------------------------------------------------------------


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _whole(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def _at_least_zero(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError("must be a number from 0 on")
    return value


def _positive(text: str) -> float:
    if not (value := _at_least_zero(text)):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _fraction(text: str) -> float:
    if (value := _at_least_zero(text)) > 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return value


def _temperature(text: str) -> float | None:
    return None if text == "default" else _at_least_zero(text)


def _span(text: str) -> Span:
    least, colon, most = text.partition(":")
    span = Span(_count(least), _count(most if colon else least))
    if span.least > span.most:
        raise argparse.ArgumentTypeError("must be N, or A:B with A not above B")
    return span


def _object(text: str) -> str:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return text
