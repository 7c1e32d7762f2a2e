"""The command line of a load, parsed into a `Job`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.load import values
from bench.load.messages import PATHS, Job, Target
from bench.load.plan import Pace, Span, Workload
from bench.load.requests import parse_url

PROCESSES_MAX = 256
CLIENTS = 16
REQUESTS = 100

DESCRIPTION = """\
Send streaming requests to an OpenAI-compatible server, by Responses over a WebSocket or by server-sent events, and
measure its answers. Each of --clients N sends its next request when its last answer has ended."""


class Mistake(Exception):
    """The command line cannot be carried out, and why."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add a load's arguments to a parser."""
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="the server's root, its /v1, or an endpoint")
    server.add_argument("--api", choices=sorted(PATHS), default="chat", help="default: chat")
    server.add_argument("--model", required=True)
    server.add_argument("--key", help="bearer token; default: $OPENAI_API_KEY")
    server.add_argument("--timeout-s", type=values.positive, default=600.0, help="of one request; default: 600")
    requests = parser.add_argument_group("requests")
    for name, words in (("prompt", "roughly"), ("output", "at most")):
        help_text = f"{words}; default: 128"
        requests.add_argument(
            f"--{name}-tokens", type=values.span, default=Span(128, 128), metavar="N|A:B", help=help_text
        )
    requests.add_argument("--ignore-eos", action="store_true", help="request answers of exactly that length")
    requests.add_argument(
        "--extra-body", type=values.json_object, default="{}", metavar="JSON", help="more fields for each request"
    )
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
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write every figure as one document; - is standard output"
    )
    output.add_argument("--raw", type=Path, metavar="FILE", help="write every request and its times as a JSON line")
    output.add_argument("--quiet", action="store_true", help="print nothing before the end")


def read(arguments: argparse.Namespace) -> Job:
    """Return the load of a parsed command line; raises `Mistake`."""
    try:
        parse_url(arguments.url, arguments.api)
    except (ValueError, UnicodeError) as error:
        raise Mistake(f"--url: {error}") from error
    if arguments.processes > min(arguments.clients, PROCESSES_MAX):
        raise Mistake(f"--processes must be at most {PROCESSES_MAX}, and no more than the {arguments.clients} clients")
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
            extra=arguments.extra_body,
            timeout_s=arguments.timeout_s,
        ),
        workload=Workload(
            seed=arguments.seed, prompt_tokens=arguments.prompt_tokens, output_tokens=arguments.output_tokens
        ),
        pace=Pace(clients=arguments.clients, requests=requests, duration_s=arguments.duration, warmup=arguments.warmup),
    )
