"""The delay of well-behaved clients during attacks on the gateway: wrong keys, slow heads, a flood of connections.

On the simulated engine in real time. Runs with each attack alternate with undisturbed ones; compared are the medians of
the 99th percentiles of the time to the first token of well-behaved clients, which have a key of their own.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from threading import Event, Thread

from bench.rig.client_keys import write_keys
from bench.rig.load_run import ALLOWED_MS, ALLOWED_TIMES, load, slowdown_allowed
from bench.rig.node import SIMULATED, Node, node, short_folder

SECRET = "a-secret-of-the-bench-that-nobody-else-has"
CONNECTIONS_MAX = 512
WRONG_KEYS_A_S = 20
SLOW_HEADS = 200
GATEWAY = """\
requests_max = 1024
keys = "{keys}"
[gateway.limits]
connections_max = {connections_max}
key_connections_max = {connections_max}
"""

Attack = Callable[[int, Event], None]


def wrong_keys(port: int, over: Event) -> None:
    """Send requests with a wrong key, again and again."""
    number = 0
    while not over.wait(1 / WRONG_KEYS_A_S):
        number += 1
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        with suppress(OSError, HTTPException):
            connection.request("POST", "/v1/chat/completions", "{}", {"authorization": f"Bearer wrong-{number}"})
            assert connection.getresponse().status == 401
        connection.close()


def slow_heads(port: int, over: Event) -> None:
    """Hold many connections, send each head a byte at a time, and replace those that are closed."""
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        while not over.wait(0.5):
            while len(sockets) < SLOW_HEADS:
                fresh = stack.enter_context(socket.socket())
                fresh.connect(("127.0.0.1", port))
                fresh.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ")
                sockets.append(fresh)
            for sock in tuple(sockets):
                try:
                    sock.send(b"a")
                except OSError:
                    sockets.remove(sock)
                    sock.close()


def flood(port: int, over: Event) -> None:
    """Open some 500 connections a second, up to the limit and beyond, close all of them, and begin again."""
    while not over.is_set():
        with ExitStack() as stack:
            for _ in range(CONNECTIONS_MAX):
                if over.is_set():
                    return
                with suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                time.sleep(0.002)  # faster, the client's own processor would be the limit


def no_attack(_: int, over: Event) -> None:
    """Do nothing."""
    over.wait()


ATTACKS: dict[str, Attack] = {"wrong keys": wrong_keys, "slow heads": slow_heads, "a flood": flood}


@contextmanager
def attack_during(attack: Attack, port: int) -> Iterator[None]:
    """Attack while the body runs; raises `RuntimeError` if the attack fails or ends before the body does."""
    over = Event()
    failures: list[BaseException] = []

    def run_attack() -> None:
        try:
            attack(port, over)
            if not over.is_set():
                failures.append(RuntimeError("the attack ended by itself"))
        except BaseException as error:  # noqa: BLE001  # it is raised in the main thread
            failures.append(error)

    thread = Thread(target=run_attack, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    if failures:
        raise RuntimeError("the attack failed during the measurement") from failures[0]
    if thread.is_alive():
        raise RuntimeError("the attack did not end")


def run(folder: Path, target: Node, attack: Attack, clients: int, seconds: float) -> float:
    """Return the p99 of the time to the first token of clients with kept connections, in milliseconds."""
    with attack_during(attack, target.port):
        options = ("--api", "responses-ws", "--clients", clients, "--duration", seconds, "--key", SECRET)
        report = load(folder, target.port, *options, "--output-tokens", 16, "--prompt-tokens", 32, "--warmup", clients)
    assert not report["errors"], report["errors"]
    p99: float = report["latencies"]["ttft"]["p99"]
    return p99


def main() -> int:
    """Run each attack, print every run, and return 1 if other clients were slowed down too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run")
    parser.add_argument("--only", choices=ATTACKS)
    arguments = parser.parse_args()
    held = True
    with short_folder() as folder:
        gateway = GATEWAY.format(keys=write_keys(folder, {"bench": SECRET}), connections_max=CONNECTIONS_MAX)
        with node(folder, slots=1024, engine=SIMULATED, gateway=gateway) as target:
            for name, attack in ATTACKS.items():
                if arguments.only in {None, name}:
                    held = compare(folder, target, name, attack, arguments) and held
    return 0 if held else 1


def compare(folder: Path, target: Node, name: str, attack: Attack, arguments: argparse.Namespace) -> bool:
    """Alternate runs without and with one attack; return whether the slowdown of other clients is allowed."""
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(arguments.times):
        alone.append(run(folder, target, no_attack, arguments.clients, arguments.seconds))
        beside.append(run(folder, target, attack, arguments.clients, arguments.seconds))
    print(f"{name}: first token p99 without it {_list(alone)} ms, during it {_list(beside)} ms")
    allowed = f"allowed {ALLOWED_TIMES} times, or {ALLOWED_MS:g} ms more"
    print(f"  medians {median(alone):.1f} and {median(beside):.1f} ms; {allowed}")
    return slowdown_allowed(median(alone), median(beside))


def _list(values: list[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
