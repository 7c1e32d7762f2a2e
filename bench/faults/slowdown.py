"""The slowdown of other clients by attackers: runs with them alternate with undisturbed ones, and medians are compared.

On the simulated engine in real time, by the load generator in processes of its own. `siege` attacks a gateway with
wrong keys, slow heads and a flood of connections: compared is the time to the first token of clients with a key of
their own. In `crowd` some WebSocket clients request long answers and never read them: compared is the time from token
to token. Both are 99th percentiles.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

from websockets.sync.client import connect

from bench.faults.scenario import Run, check
from bench.rig.clients import response_body, write_keys
from bench.rig.node import MODEL, ROOT, SIMULATED, Node, node, wait_until

COLUMNS = ("beside", "alone ms", "beside them ms", "allowed ms")
LOAD_WITHIN_S = 300.0
ALLOWED_TIMES, ALLOWED_MS = 1.5, 20.0
SECRET = "a-secret-of-the-bench-that-nobody-else-has"
SLOTS, CONNECTIONS_MAX = 1024, 512
WRONG_KEYS_A_S = 20
SLOW_HEADS = 200
BESIEGED = """\
requests_max = 1024
keys = "{keys}"
[gateway.limits]
connections_max = {connections_max}
key_connections_max = {connections_max}
"""
# Small enough to fill within the run: an answer of 20 tokens a second has some 5 kB a second.
CROWDED = """\
requests_max = 1024
[gateway.limits]
send_buffer_bytes = 8192
backlog_bytes_max = 16384
"""
RECEIVE_BUFFER = 4096  # bytes, of a client that does not read
DROPPED_WITHIN_S = 60.0
JOIN_S = 60.0


def load(folder: Path, port: int, *options: object) -> dict[str, Any]:
    """Run `bench load` against a port with these options; return its JSON report. Raises if it did not exit with 0."""
    out = folder / "load.json"
    command = [sys.executable, "-m", "bench", "load", "--url", f"http://127.0.0.1:{port}", "--model", MODEL]
    command += ["--quiet", "--json", str(out), *map(str, options)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=LOAD_WITHIN_S, stdout=subprocess.DEVNULL)
    document: dict[str, Any] = json.loads(out.read_text())
    check(not document["errors"], f"requests failed: {document['errors']}")
    return document


def compare(run: Run, name: str, alone: Callable[[], float], beside: Callable[[], float], extra_ms: float) -> None:
    """Alternate runs without and with attackers, and compare the medians of what each returns, in milliseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(run.options.times):
        times[0].append(alone())
        times[1].append(beside())
    allowed = max(ALLOWED_TIMES * median(times[0]), median(times[0]) + extra_ms)
    run.row(name, *times, allowed)
    run.check(median(times[1]) <= allowed, f"{name}: {median(times[1]):.1f} ms, {allowed:.1f} ms are allowed")


@contextmanager
def attacking(attack: Callable[[Event], object], threads: int = 1, *, join: bool = True) -> Iterator[None]:
    """Attack in so many threads while the body runs; raises `RuntimeError` if one fails, or ends before the body does.

    Each gets the event that ends it.
    """
    over, failures = Event(), list[BaseException]()

    def run_attack() -> None:
        try:
            attack(over)
            if not over.is_set():
                failures.append(RuntimeError("the attack ended by itself"))
        except BaseException as error:  # noqa: BLE001  # it is raised in the main thread
            failures.append(error)

    running = [Thread(target=run_attack, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join(JOIN_S if join else 0.0)
    if failures:
        raise RuntimeError("the attack failed during the measurement") from failures[0]
    if join and any(thread.is_alive() for thread in running):
        raise RuntimeError("the attack did not end")


# Attacks on a gateway --------------------------------------------------------------------


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


def slow_heads(port: int, over: Event, count: int = SLOW_HEADS) -> None:
    """Hold many connections, send each head a byte at a time, and replace closed ones."""
    sockets: list[socket.socket] = []
    while not over.wait(0.5):
        while len(sockets) < count and not over.is_set():
            with suppress(OSError):
                sockets.append(socket.create_connection(("127.0.0.1", port), timeout=0.5))
                sockets[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ")
        for sock in tuple(sockets):
            try:
                sock.send(b"a")
            except OSError:
                sockets.remove(sock)
                sock.close()
    for sock in sockets:
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


ATTACKS: dict[str, Callable[[int, Event], None]] = {
    "wrong keys": wrong_keys,
    "slow heads": slow_heads,
    "a flood": flood,
}


def siege(run: Run) -> None:
    """Compare each attack on a gateway with its absence."""
    clients = run.options.clients
    gateway = BESIEGED.format(keys=write_keys(run.folder, {"bench": SECRET}), connections_max=CONNECTIONS_MAX)
    options = ("--api", "responses-ws", "--clients", clients, "--duration", run.options.seconds, "--key", SECRET)
    lengths = ("--output-tokens", 16, "--prompt-tokens", 32, "--warmup", clients)
    with node(run.folder, slots=SLOTS, engine=SIMULATED, gateway=gateway) as target:

        def first_token_ms() -> float:
            value: float = load(run.folder, target.port, *options, *lengths)["latencies"]["ttft"]["p99"]
            return value

        def during(attack: Callable[[Event], None]) -> float:
            with attacking(attack):
                return first_token_ms()

        for name in run.chosen(ATTACKS):
            attack = partial(ATTACKS[name], target.port)
            compare(run, name, first_token_ms, partial(during, attack), ALLOWED_MS)


# Clients that never read -----------------------------------------------------------------


@contextmanager
def never_reading(port: int, count: int) -> Iterator[None]:
    """Connect so many clients that request 4,096 tokens and never read them, while the body runs."""
    with ExitStack() as stack:
        for _ in range(count):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            raw.connect(("127.0.0.1", port))
            # With one message in its queue, the client stops reading from the socket.
            url = f"ws://127.0.0.1:{port}/v1/responses"
            client = stack.enter_context(connect(url, sock=raw, max_queue=1, ping_interval=None, close_timeout=0))
            client.send(json.dumps(response_body("Tell me everything", 4096)))
        yield


def gap_ms(folder: Path, target: Node, clients: int, tokens: int, api: str = "responses-ws") -> float:
    """Return the 99th percentile of the time from token to token, of as many answers as clients."""
    # The first requests are not counted: five hundred handshakes at once would be a different measurement.
    options = ("--api", api, "--clients", clients, "--requests", clients, "--warmup", clients)
    report = load(folder, target.port, *options, "--ignore-eos", "--output-tokens", tokens, "--prompt-tokens", 32)
    check(report["requests"]["completed"] == clients, f"not all completed: {report['requests']}")
    value: float = report["latencies"]["itl"]["p99"]
    return value


def crowd(run: Run) -> None:
    """Compare many clients beside some that never read with the same ones alone."""
    clients, mutes = run.options.clients, run.options.mutes
    with node(run.folder, slots=SLOTS, engine=SIMULATED, gateway=CROWDED) as target:

        def dropped() -> float:
            return target.metric("espalier_clients_dropped_total")

        def beside() -> float:
            before = dropped()
            with never_reading(target.port, mutes):
                value = gap_ms(run.folder, target, clients, 64)
                all_dropped = wait_until(lambda: dropped() - before >= mutes, DROPPED_WITHIN_S, 0.2)
                check(all_dropped is not None, "a client that never reads was not dropped")
            idle = wait_until(lambda: target.metric("espalier_engine_running") == 0, 5.0, 0.05)
            check(idle is not None, "a request of a dropped client still runs")
            return value

        compare(run, f"{mutes} that never read", lambda: gap_ms(run.folder, target, clients, 64), beside, ALLOWED_MS)
