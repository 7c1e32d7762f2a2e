"""The command line of a load, parsed into a `Job`; contradictory options are refused by name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec
from attrs import frozen

from bench.load import values
from bench.load.messages import PATHS, Job, Target
from bench.load.plan import Pace, Prompt, Span, TracedRequest, Workload
from bench.load.requests import parse_url
from bench.load.trace import read_trace

PROCESSES_MAX = 256
CLIENTS_DEFAULT = 16
REQUESTS_DEFAULT = 100

DESCRIPTION = """\
Send requests to an OpenAI-compatible server and measure its answers. Closed loop: --clients N, each of which sends its
next request when its last answer has ended. Open loop: --rate R, a Poisson process, or a gamma process with
--burstiness; or --trace FILE, the times of its lines. An open loop waits for nobody. With --turns each client, or each
arrival, is a conversation, whose requests follow each other."""


class Mistake(Exception):
    """The command line cannot be carried out, and why."""


@frozen(kw_only=True)
class Options:
    """The parsed command line."""

    job: Job
    processes: int
    json: Path | None
    raw: Path | None
    html: Path | None
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
    server.add_argument("--timeout-s", type=values.positive, default=600.0, help="of one request; default: 600")
    server.add_argument("--connections-a-client", choices=["reuse", "new"], default="reuse")
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--prompt-tokens", type=values.span, default=Span(128, 128), metavar="N|A:B", help="roughly; default: 128"
    )
    requests.add_argument(
        "--output-tokens", type=values.span, default=Span(128, 128), metavar="N|A:B", help="at most; default: 128"
    )
    requests.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines {"prompt": ..., "max_tokens": ...}')
    requests.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Mooncake's form: lengths, shared blocks, and times unless there are --clients or a --rate",
    )
    requests.add_argument("--trace-block-tokens", type=values.count, default=512, metavar="N", help="default: 512")
    requests.add_argument(
        "--trace-scale", type=values.positive, default=1.0, metavar="X", help="a factor for its lengths, blocks too"
    )
    requests.add_argument(
        "--prefix-tokens", type=values.span, metavar="N|A:B", help="a shared beginning before the prompt"
    )
    requests.add_argument("--prefixes", type=values.count, metavar="N", help="different ones, drawn evenly; default: 1")
    requests.add_argument(
        "--turns",
        type=values.span,
        default=Span(1, 1),
        metavar="N|A:B",
        help="of a conversation, each with a prompt "
        "of its own behind those before; responses-ws names the previous response, the others send all of it",
    )
    requests.add_argument("--ignore-eos", action="store_true", help="request answers of exactly that length")
    requests.add_argument("--temperature", type=values.temperature, default=0.0, metavar="T|default", help="default: 0")
    requests.add_argument(
        "--running-usage", action="store_true", help="request usage with every event, if the server supports it"
    )
    requests.add_argument(
        "--extra-body", type=values.json_object, default="{}", metavar="JSON", help="more fields for each request"
    )
    requests.add_argument(
        "--seed", type=int, default=0, help="a server that has seen the same seed has the prompts cached"
    )


def _add_pace_and_output(parser: argparse.ArgumentParser) -> None:
    pace = parser.add_argument_group("pace")
    loop = pace.add_mutually_exclusive_group()
    loop.add_argument("--clients", type=values.count, help=f"closed loop; default: {CLIENTS_DEFAULT}")
    loop.add_argument("--rate", type=values.positive, help="open loop, requests a second")
    pace.add_argument(
        "--burstiness",
        type=values.positive,
        help="with --rate, the shape of a gamma distribution of gaps: 1 is Poisson, less comes in bursts, more evenly",
    )
    pace.add_argument("--trace-speed", type=values.positive, help="a factor for the times of a trace; default: 1")
    pace.add_argument(
        "--think-s",
        type=values.at_least_zero,
        default=0.0,
        help="pause of a client, or of a conversation, before the next request",
    )
    pace.add_argument("--concurrency-max", type=values.count, help="open loop: delay requests beyond it")
    pace.add_argument(
        "--requests",
        type=values.count,
        help=f"or conversations; default: {REQUESTS_DEFAULT}, or all of the trace, unless there is a duration",
    )
    pace.add_argument(
        "--duration", type=values.positive, metavar="S", help="send for this long, then wait for the running requests"
    )
    pace.add_argument(
        "--warmup", type=values.whole, default=0, metavar="N", help="requests before the start, not counted"
    )
    pace.add_argument(
        "--warm-connections", action="store_true", help="closed loop: keep the connections of the warm-up"
    )
    leave = parser.add_argument_group("early disconnects")
    leave.add_argument(
        "--cancel-rate",
        type=values.fraction,
        default=0.0,
        help="share of requests whose client disconnects early, 0 to 1: half "
        "of them before the first token, the others after a random number of tokens",
    )
    leave.add_argument(
        "--cancel-within-s",
        type=values.at_least_zero,
        default=0.5,
        help="disconnects before the first token happen after a thousandth of this to all of it, evenly over orders "
        "of magnitude, or at that token; default: 0.5",
    )
    leave.add_argument(
        "--cancel-by", choices=["close", "event"], default="close", help="event: response.cancel, responses-ws only"
    )
    output = parser.add_argument_group("processes and output")
    output.add_argument("--processes", type=values.count, default=1, help="that share the load; default: 1")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure as one document; - is standard output"
    )
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with the figures and plots")
    output.add_argument("--raw", type=Path, metavar="FILE", help="write every request as a JSON line")
    output.add_argument("--quiet", action="store_true", help="show no progress")


def read(arguments: argparse.Namespace) -> Options:
    """Return the options of a parsed command line; raises `Mistake`."""
    try:
        parse_url(arguments.url, arguments.api)
    except (ValueError, UnicodeError) as error:
        raise Mistake(f"--url: {error}") from error
    _check_workload(arguments)
    workload = _workload(arguments)
    job = Job(target=_target(arguments), workload=workload, pace=_pace(arguments, len(workload.trace)))
    if not 1 <= arguments.processes <= PROCESSES_MAX:
        raise Mistake(f"--processes must be from 1 to {PROCESSES_MAX}")
    together = job.pace.clients or job.pace.concurrency_max
    if together is not None and arguments.processes > together:
        raise Mistake(f"--processes {arguments.processes} cannot share {together} clients: some would have none")
    return Options(
        job=job,
        processes=arguments.processes,
        json=arguments.json,
        raw=arguments.raw,
        html=arguments.html,
        quiet=arguments.quiet,
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


def _check_workload(arguments: argparse.Namespace) -> None:
    if arguments.trace is not None and (arguments.prompts or arguments.prefix_tokens or arguments.turns.most > 1):
        raise Mistake("--trace has its own prompts: leave out --prompts, --prefix-tokens and --turns")
    if arguments.prefixes is not None and arguments.prefix_tokens is None:
        raise Mistake("--prefixes needs --prefix-tokens")
    if arguments.turns.most > 1:
        if arguments.prompts:
            raise Mistake("--turns needs random prompts: leave out --prompts")
        if arguments.api == "completions":
            raise Mistake("--turns needs another --api: completions have no conversations")
        if arguments.api == "responses-ws" and arguments.connections_a_client == "new":
            raise Mistake("--turns needs --connections-a-client reuse: a WebSocket knows only its own responses")


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        seed=arguments.seed,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        prompts=() if arguments.prompts is None else prompts(arguments.prompts),
        trace=() if arguments.trace is None else _trace(arguments.trace, arguments.trace_scale),
        block_tokens=max(1, round(arguments.trace_block_tokens * arguments.trace_scale)),
        prefixes=0 if arguments.prefix_tokens is None else arguments.prefixes or 1,
        prefix_tokens=arguments.prefix_tokens or Span(0, 0),
        turns=arguments.turns,
        cancel_rate=arguments.cancel_rate,
        cancel_within_s=arguments.cancel_within_s,
    )


def _trace(path: Path, scale: float) -> tuple[TracedRequest, ...]:
    try:
        return read_trace(path, scale)
    except (OSError, ValueError) as error:
        raise Mistake(f"--trace: {error}") from error


def _pace(arguments: argparse.Namespace, lines: int) -> Pace:
    """Return when requests are sent; `lines` is the length of the trace, 0 without one."""
    traced = lines > 0 and arguments.rate is None and arguments.clients is None
    open_loop = traced or arguments.rate is not None
    if arguments.concurrency_max is not None and not open_loop:
        raise Mistake("--concurrency-max needs an open loop; a closed one has its --clients")
    if open_loop and arguments.think_s and arguments.turns.most == 1:
        raise Mistake("--think-s needs --clients or --turns; an open loop waits for nobody")
    if arguments.burstiness is not None and arguments.rate is None:
        raise Mistake("--burstiness needs --rate")
    if arguments.trace_speed is not None and not traced:
        raise Mistake("--trace-speed needs --trace without --clients and --rate, which replace its times")
    if arguments.warm_connections and (open_loop or not arguments.warmup):
        raise Mistake("--warm-connections needs --clients and a --warmup that opens them")
    requests = arguments.requests
    if requests is None and arguments.duration is None:
        requests = lines or REQUESTS_DEFAULT
    return Pace(
        clients=None if open_loop else arguments.clients or CLIENTS_DEFAULT,
        think_s=arguments.think_s,
        rate=arguments.rate,
        burstiness=arguments.burstiness or 1.0,
        traced=traced,
        trace_speed=arguments.trace_speed or 1.0,
        concurrency_max=arguments.concurrency_max,
        requests=min(requests, lines) if traced and requests is not None else requests,
        duration_s=arguments.duration,
        warmup=arguments.warmup,
        warm_connections=arguments.warm_connections,
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
