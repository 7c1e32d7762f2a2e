"""Five hundred WebSocket clients beside ten that request long answers and never read them: are they slowed down?

On the simulated engine in real time, 20 tokens a second for each stream. Runs without and with the ten alternate;
compared are the medians of the 99th percentiles of the time from token to token.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from websockets.sync.client import connect

from bench.rig.clients import response_body
from bench.rig.load_run import ALLOWED_MS, ALLOWED_TIMES, load, slowdown_allowed
from bench.rig.node import SIMULATED, Node, node, short_folder, wait_until

RECEIVE_BUFFER = 4096  # bytes, of a client that does not read
DROPPED_WITHIN_S = 60.0
# Small enough to fill within the run: an answer of 20 tokens a second has some 5 kB a second.
GATEWAY = """\
requests_max = 1024
[gateway.limits]
send_buffer_bytes = 8192
backlog_bytes_max = 16384
"""


@contextmanager
def never_reading(port: int, count: int) -> Iterator[None]:
    """Connect so many clients that request 4,096 tokens and never read them, while the body runs."""
    url = f"ws://127.0.0.1:{port}/v1/responses"
    with ExitStack() as stack:
        for _ in range(count):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            raw.connect(("127.0.0.1", port))
            # With one message in its queue, the client stops reading from the socket.
            client = stack.enter_context(connect(url, sock=raw, max_queue=1, ping_interval=None, close_timeout=0))
            client.send(json.dumps(response_body("Tell me everything", 4096)))
        yield


def run(folder: Path, target: Node, clients: int, mutes: int) -> tuple[float, dict[str, int]]:
    """Run the clients once beside so many that never read; return their p99 in milliseconds and their endings."""
    before = target.metric("espalier_clients_dropped_total")

    def all_dropped() -> bool:
        return target.metric("espalier_clients_dropped_total") - before >= mutes

    with never_reading(target.port, mutes):
        # The first requests are not counted: five hundred handshakes at once would be a different measurement.
        options = ("--api", "responses-ws", "--clients", clients, "--requests", clients, "--warmup", clients)
        lengths = ("--ignore-eos", "--output-tokens", 64, "--prompt-tokens", 32)
        report = load(folder, target.port, *options, *lengths)
        assert wait_until(all_dropped, DROPPED_WITHIN_S, 0.2) is not None, "a client that never reads was not dropped"
    idle = wait_until(lambda: target.metric("espalier_engine_running") == 0, 5.0, 0.05)
    assert idle is not None, "a request of a dropped client still runs"
    return report["latencies"]["itl"]["p99"], report["requests"]


def main() -> int:
    """Alternate, print every run, and return 1 if a request did not complete or was slowed down too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--mutes", type=int, default=10)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    p99: dict[int, list[float]] = {0: [], arguments.mutes: []}
    whole = True
    with short_folder() as folder, node(folder, slots=1024, engine=SIMULATED, gateway=GATEWAY) as target:
        for turn in range(arguments.times):
            for mutes, values in p99.items():
                value, requests = run(folder, target, arguments.clients, mutes)
                values.append(value)
                whole = whole and requests["completed"] == arguments.clients
                ends = f"{requests['completed']} of {arguments.clients} completed, {mutes} never read"
                print(f"run {turn + 1}: token to token p99 {value:.1f} ms, {ends}", flush=True)
    alone, beside = (median(values) for values in p99.values())
    print(f"median p99 alone {alone:.1f} ms, beside them {beside:.1f} ms")
    print(f"allowed: {ALLOWED_TIMES} times, or {ALLOWED_MS:g} ms more")
    return 0 if whole and slowdown_allowed(alone, beside) else 1


if __name__ == "__main__":
    sys.exit(main())
