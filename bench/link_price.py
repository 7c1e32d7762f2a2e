"""The CPU time of a token over a link, compared with one within a node, in microseconds.

The same streams are read in alternation from one node with a simulated engine, and from a front whose engine is on a
second node of this machine. Both figures contain the engine's simulation. So the cost of the link, at both ends, is
what the two processes use more than the one. Each figure contains the request's share of its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection

from bench.rig.clients import TIMEOUT_S, chat_body
from bench.rig.cluster import Plan, cluster, simulated
from bench.rig.node import Node, node, short_folder
from bench.rig.processes import cpu_s

WORKER = "worker"
COSTS = {"fixed_s": 0.02, "per_prefill_token_s": 0.0, "per_running_s": 0.0}  # 50 tokens a second for each stream
ENGINE = """\
kind = "simulated"
context_max = 8192
kv_tokens_max = 1_000_000
[engine.tiny-0.simulated.costs]
"""


def read_one(port: int, tokens: int) -> None:
    """Read one stream of so many tokens to its end."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        body = json.dumps(chat_body("Tell me", tokens))
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        body_bytes = connection.getresponse().read()  # not one event at a time: the reader shares the cores
    assert body_bytes.endswith(b"data: [DONE]\n\n"), body_bytes[-300:]


def burst(nodes: Sequence[Node], streams: int, tokens: int) -> list[float]:
    """Return the CPU time a token of each node while streams are read from the first, in microseconds."""
    before = [cpu_s(each.pid) for each in nodes]
    with ThreadPoolExecutor(streams) as readers:
        list(readers.map(read_one, [nodes[0].port] * streams, [tokens] * streams))
    after = [cpu_s(each.pid) for each in nodes]
    return [1e6 * (end_s - begin_s) / (streams * tokens) for begin_s, end_s in zip(before, after, strict=True)]


def row(name: str, taken: Sequence[float]) -> None:
    """Print the figures of one process, or of several together."""
    print(f"{name:<34}{statistics.median(taken):>8.1f}{min(taken):>8.1f}{max(taken):>8.1f}")


def main() -> int:
    """Print the CPU times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=250)
    arguments = parser.parse_args()
    streams, tokens = arguments.streams, arguments.tokens
    within: list[float] = []
    across: list[list[float]] = []
    costs = "\n".join(f"{key} = {value}" for key, value in COSTS.items())
    with short_folder() as folder:
        for name in ("one", "two"):
            (folder / name).mkdir()
        plan = Plan({WORKER: simulated(WORKER, slots=streams, costs=COSTS)})
        with node(folder / "one", slots=streams, engine=ENGINE + costs) as single, cluster(folder / "two", plan) as two:
            pair = [two.front, two.nodes[WORKER]]
            for nodes in ([single], pair):
                burst(nodes, streams, 16)  # first requests cost more than any others
            for _ in range(arguments.rounds):
                within += burst([single], streams, tokens)
                across.append(burst(pair, streams, tokens))
    print(f"CPU us a token, {streams} streams of {tokens} tokens, {arguments.rounds} rounds in alternation")
    print(f"{'':<34}{'median':>8}{'min':>8}{'max':>8}")
    row("one node, with the engine", within)
    row("two nodes: the front", [each[0] for each in across])
    row("two nodes: the engine's", [each[1] for each in across])
    row("two nodes together", [sum(each) for each in across])
    row("the link, both its ends", [sum(both) - alone for both, alone in zip(across, within, strict=True)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
