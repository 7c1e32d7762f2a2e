"""The delay of well-behaved clients during attacks on the gateway: wrong keys, slow heads, a flood of connections.

On the simulated engine in real time. Each attack alternates with peace; compared are the medians of the 99th
percentiles of the time to the first token of well-behaved clients, who have a key of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from threading import Event, Thread

from bench.rig.load_run import ALLOWED_MS, ALLOWED_TIMES, load, slowdown_allowed
from bench.rig.node import SIMULATED, Node, node, place

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
    """Knock with a wrong key, again and again."""
    number = 0
    while not over.wait(1 / WRONG_KEYS_A_S):
        number += 1
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        with suppress(OSError, HTTPException):
            connection.request("POST", "/v1/chat/completions", "{}", {"authorization": f"Bearer wrong-{number}"})
            assert connection.getresponse().status == 401
        connection.close()


def slow_heads(port: int, over: Event) -> None:
    """Hold many connections, and send each head a byte at a time; whoever is cut off comes back."""
    sockets: list[socket.socket] = []
    with ExitStack() as stack:
        while not over.wait(0.5):
            while len(sockets) < SLOW_HEADS:
                fresh = stack.enter_context(socket.socket())
                fresh.connect(("127.0.0.1", port))
                fresh.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ")
                sockets.append(fresh)
            for each in tuple(sockets):
                try:
                    each.send(b"a")
                except OSError:
                    sockets.remove(each)
                    each.close()


def flood(port: int, over: Event) -> None:
    """Open connections as fast as one thread can, up to the limit and over it, and let them go again."""
    while not over.is_set():
        with ExitStack() as stack:
            for _ in range(CONNECTIONS_MAX):
                if over.is_set():
                    return
                with suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                time.sleep(0.002)  # some 500 a second: more is a test of the client's processor


def no_attack(_: int, over: Event) -> None:
    """Do nothing."""
    over.wait()


ATTACKS: dict[str, Attack] = {"wrong keys": wrong_keys, "slow heads": slow_heads, "a flood": flood}


@contextmanager
def attack_during(attack: Attack, port: int) -> Iterator[None]:
    """Attack while the body runs; an attack that fails, or ends before the body does, proves nothing and raises."""
    over = Event()
    failures: list[BaseException] = []

    def run_attack() -> None:
        try:
            attack(port, over)
            if not over.is_set():
                failures.append(RuntimeError("the attack ended by itself"))
        except BaseException as error:  # noqa: BLE001  # it is raised where somebody looks
            failures.append(error)

    thread = Thread(target=run_attack, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    if failures:
        raise RuntimeError("what was measured was no attack") from failures[0]
    if thread.is_alive():
        raise RuntimeError("the attack does not end")


def run(folder: Path, target: Node, attack: Attack, clients: int, seconds: float) -> float:
    """Return the p99 of the time to the first token, in ms, of clients who keep their connections."""
    with attack_during(attack, target.port):
        options = ("--api", "responses-ws", "--clients", clients, "--duration", seconds, "--key", SECRET)
        found = load(folder, target.port, *options, "--output-tokens", 16, "--prompt-tokens", 32, "--warmup", clients)
    assert not found["errors"], found["errors"]
    p99: float = found["latencies"]["ttft"]["p99"]
    return p99


def main() -> int:
    """Alternate peace and each attack, print every run, and return 1 if others were slowed down too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run; five make a minute")
    parser.add_argument("--only", choices=ATTACKS)
    arguments = parser.parse_args()
    held = True
    with place() as folder:
        keys = folder / "keys.toml"
        keys.write_text(f'[key.bench]\nsha256 = "{hashlib.sha256(SECRET.encode()).hexdigest()}"\n')
        gateway = GATEWAY.format(keys=keys, connections_max=CONNECTIONS_MAX)
        with node(folder, slots=1024, engine=SIMULATED, gateway=gateway) as target:
            for name, attack in ATTACKS.items():
                if arguments.only in {None, name}:
                    held = compared(folder, target, name, attack, arguments) and held
    return 0 if held else 1


def compared(folder: Path, target: Node, name: str, attack: Attack, arguments: argparse.Namespace) -> bool:
    """Alternate peace and one attack, and return whether others were slowed down by no more than they may."""
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(arguments.times):
        alone.append(run(folder, target, no_attack, arguments.clients, arguments.seconds))
        beside.append(run(folder, target, attack, arguments.clients, arguments.seconds))
    print(f"{name}: first token p99 alone {_list(alone)} ms, beside it {_list(beside)} ms")
    allowed = f"allowed {ALLOWED_TIMES} times, or {ALLOWED_MS:g} ms more"
    print(f"  medians {median(alone):.1f} and {median(beside):.1f} ms; {allowed}")
    return slowdown_allowed(median(alone), median(beside))


def _list(values: list[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
