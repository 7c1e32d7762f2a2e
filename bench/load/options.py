"""The command line of a load, read into a `Job`; what makes no sense together is refused by name."""

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
    """The command line asks for something impossible."""


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
    _add_whom_and_what(parser)
    _add_when_and_how(parser)


def _add_whom_and_what(parser: argparse.ArgumentParser) -> None:
    whom = parser.add_argument_group("whom")
    whom.add_argument("--url", default="http://127.0.0.1:8000", help="the server's root, its /v1, or an endpoint")
    whom.add_argument("--api", choices=sorted(PATHS), default="chat", help="default: chat")
    whom.add_argument("--model", required=True)
    whom.add_argument("--key", help="bearer token; default: $OPENAI_API_KEY")
    whom.add_argument("--timeout-s", type=_positive, default=600.0, help="of one request; default: 600")
    whom.add_argument("--connections-a-client", choices=["reuse", "new"], default="reuse")
    what = parser.add_argument_group("what")
    what.add_argument(
        "--prompt-tokens", type=_span, default=Span(128, 128), metavar="N|A:B", help="about; default: 128"
    )
    what.add_argument(
        "--output-tokens", type=_span, default=Span(128, 128), metavar="N|A:B", help="at most; default: 128"
    )
    what.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines {"prompt": ..., "max_tokens": ...}')
    what.add_argument("--ignore-eos", action="store_true", help="ask for answers of exactly that length")
    what.add_argument("--temperature", type=_temperature, default=0.0, metavar="T|default", help="default: 0")
    what.add_argument(
        "--running-usage", action="store_true", help="ask for usage with every event, where a server has it"
    )
    what.add_argument("--extra-body", type=_object, default="{}", metavar="JSON", help="more fields for each request")
    what.add_argument("--seed", type=int, default=0, help="the same finds its prompts cached in a server that saw them")


def _add_when_and_how(parser: argparse.ArgumentParser) -> None:
    when = parser.add_argument_group("when")
    loop = when.add_mutually_exclusive_group()
    loop.add_argument("--clients", type=_count, help=f"closed loop; default: {CLIENTS_DEFAULT}")
    loop.add_argument("--rate", type=_positive, help="open loop, requests a second")
    when.add_argument("--think-s", type=_at_least_zero, default=0.0, help="closed loop: pause before the next request")
    when.add_argument("--concurrency-max", type=_count, help="open loop: hold back what is due beyond it")
    when.add_argument("--requests", type=_count, help=f"default: {REQUESTS_DEFAULT}, unless there is a duration")
    when.add_argument(
        "--duration", type=_positive, metavar="S", help="send for this long; what runs then is waited for"
    )
    when.add_argument("--warmup", type=_whole, default=0, metavar="N", help="requests before the start, not counted")
    leave = parser.add_argument_group("leaving")
    leave.add_argument(
        "--cancel-rate",
        type=_fraction,
        default=0.0,
        help="of the requests that leave early, 0 to 1: half "
        "of them before the first token, the others after a random number of tokens",
    )
    leave.add_argument(
        "--cancel-within-s",
        type=_at_least_zero,
        default=0.5,
        help="who leaves before the first token does so after a thousandth of this to all of it, evenly over orders "
        "of magnitude, or at that token; default: 0.5",
    )
    leave.add_argument(
        "--cancel-by", choices=["close", "event"], default="close", help="event: response.cancel, responses-ws only"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--processes", type=_count, default=1, help="that share the load; default: 1")
    how.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure as one document; - is standard output"
    )
    how.add_argument("--raw", type=Path, metavar="FILE", help="write every request as a JSON line")
    how.add_argument("--quiet", action="store_true", help="show no progress")


def read(arguments: argparse.Namespace) -> Options:
    """Return what a parsed command line means; raises `Mistake`."""
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


def _target(given: argparse.Namespace) -> Target:
    if given.cancel_by == "event" and given.api != "responses-ws":
        raise Mistake("--cancel-by event needs --api responses-ws: other APIs have no such event")
    if given.running_usage and given.api not in {"chat", "completions"}:
        raise Mistake("--running-usage needs --api chat or completions")
    return Target(
        url=given.url,
        api=given.api,
        model=given.model,
        key=given.key if given.key is not None else os.environ.get("OPENAI_API_KEY"),
        temperature=given.temperature,
        ignore_eos=given.ignore_eos,
        running_usage=given.running_usage,
        extra=given.extra_body,
        timeout_s=given.timeout_s,
        reuse=given.connections_a_client == "reuse",
        cancel_by=given.cancel_by,
    )


def _workload(given: argparse.Namespace) -> Workload:
    return Workload(
        seed=given.seed,
        prompt_tokens=given.prompt_tokens,
        output_tokens=given.output_tokens,
        prompts=() if given.prompts is None else prompts(given.prompts),
        cancel_rate=given.cancel_rate,
        cancel_within_s=given.cancel_within_s,
    )


def _pace(given: argparse.Namespace) -> Pace:
    if given.rate is None and given.concurrency_max is not None:
        raise Mistake("--concurrency-max needs --rate; a closed loop has its --clients")
    if given.rate is not None and given.think_s:
        raise Mistake("--think-s needs --clients; an open loop waits for nobody")
    return Pace(
        clients=None if given.rate is not None else given.clients or CLIENTS_DEFAULT,
        think_s=given.think_s,
        rate=given.rate,
        concurrency_max=given.concurrency_max,
        requests=REQUESTS_DEFAULT if given.requests is None and given.duration is None else given.requests,
        duration_s=given.duration,
        warmup=given.warmup,
    )


def prompts(path: Path) -> tuple[Prompt, ...]:
    """Read a prompts file; raises `Mistake` with the line that is none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeError) as error:
        raise Mistake(f"--prompts: {error}") from error
    found = tuple(_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise Mistake(f"--prompts: {path} holds none")
    return found


def _prompt(line: str, where: str) -> Prompt:
    try:
        said = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise Mistake(f"--prompts: {where}: {error}") from error
    if not isinstance(said, dict) or not isinstance(said.get("prompt"), str):
        raise Mistake(f"--prompts: {where}: must be an object with a text `prompt`")
    if strange := sorted(set(said) - {"prompt", "max_tokens"}):
        raise Mistake(f"--prompts: {where}: nothing is known of {', '.join(strange)}")
    most = said.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise Mistake(f"--prompts: {where}: max_tokens must be a whole number from 1 on")
    return Prompt(said["prompt"], most)


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
        said = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return text
