"""Attacks from outside, each beside an honest client, which may lose no answer and wait for no token.

An attack is legal or nearly so: large answers, slow readers, unfinished heads. Beside each, an honest client with a key
of its own streams answers (`honest_client`). None of them may be lost, and no gap between two of their tokens may be
longer than the engine's own by more than `GAP_S_MAX`. Workers that fail or stop are in `chaos`.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from attrs import define, field

from bench.faults import slowdown
from bench.faults.scenario import Run
from bench.faults.slowdown import attacking
from bench.rig.clients import headers, write_keys
from bench.rig.node import MODEL, ROOT, SIMULATED, Node, node
from bench.rig.processes import memory_max_mb

COLUMNS = ("attack", "held", "own gap ms", "worst", "first", "whole", "lost", "result")
GAP_S_MAX = 0.25
GATEWAY = 'requests_max = 512\nwaiting_max = 1024\nkeys = "{keys}"\n'
HONEST, ATTACKER = "honest-secret-of-the-bench-000001", "attacker-secret-of-the-bench-0001"
UNDISTURBED_S = 4.0  # before each attack, in which the engine's own gaps are measured
ENDS_WITHIN_S = 40.0  # of the honest client, whose answers last 3 s, and of the node
TIMEOUT_S = 60.0
FIRST_FRAME, EMPTY_FRAMES = b"\x01\x80\0\0\0\0", b"\x00\x80\0\0\0\0" * 10_000  # of a message that stays empty


@define
class Verdict:
    """The figures of the honest client beside one attack; times in milliseconds."""

    own_gap_ms: float = 0.0  # of the engine: the median before the attack
    worst_gap_ms: float = 0.0
    worst_first_ms: float = 0.0
    whole: int = 0
    lost: list[str] = field(factory=list)
    wrong: list[str] = field(factory=list)  # other promises that were broken
    result: str = ""  # of the attack itself, in words

    @property
    def held(self) -> bool:
        """Whether every promise was kept: nothing lost, nothing wrong, no gap too long."""
        return not (self.lost or self.wrong) and self.worst_gap_ms - self.own_gap_ms <= 1000 * GAP_S_MAX

    def conclude(self, result: str, *, kept: bool = True) -> None:
        """Set the result of the attack; it counts as wrong unless its own promise was kept."""
        self.result = result
        if not kept:
            self.wrong.append(result)

    def judge(self, measured: dict[str, Any], attack_at: float) -> None:
        """Fill in the client's measurements; the attack began at `attack_at` by the same clock."""
        own = [gap for at, gap in measured["gaps"] if at < attack_at]
        during = [gap for at, gap in measured["gaps"] if at >= attack_at]
        self.own_gap_ms = 1000 * median(own or [0.0])
        self.worst_gap_ms = 1000 * max(during, default=0.0)
        self.worst_first_ms = 1000 * max((first for at, first in measured["firsts"] if at >= attack_at), default=0.0)
        self.whole += len(measured["whole"])
        self.lost += measured["lost"]
        if not during:
            self.wrong.append("the honest client got no token during the attack")


Attack = Callable[[Path, Verdict], None]


def attack_beside(run: Run, name: str, attack: Attack) -> None:
    """Run one attack, and add its row."""
    verdict = Verdict()
    attack(run.folder, verdict)
    times = (verdict.own_gap_ms, verdict.worst_gap_ms, verdict.worst_first_ms)
    words = "; ".join(filter(None, (verdict.result, *verdict.wrong)))
    run.row(name, "yes" if verdict.held else "NO", *times, verdict.whole, len(verdict.lost), words)
    run.check(verdict.held, f"{name}: {[*verdict.wrong, *verdict.lost[:3]] or 'a gap was too long'}")


@contextmanager
def attacked_node(
    folder: Path,
    verdict: Verdict,
    *,
    slots: int = 256,
    engine: str = SIMULATED,
    while_draining: Callable[[], object] = lambda: None,
) -> Iterator[Node]:
    """Run a node with the honest client before and while the body attacks, fill in the verdict, and end it by SIGTERM.

    `while_draining` runs after the signal.
    """
    keys = write_keys(folder, {"honest": HONEST, "attacker": ATTACKER})
    with node(folder, slots=slots, engine=engine, gateway=GATEWAY.format(keys=keys)) as target:
        out = folder / "honest.json"
        command = [sys.executable, "-m", "bench.faults.honest_client", str(target.port), str(out), HONEST]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as client:
            try:
                assert client.stdout is not None
                client.stdout.readline()
                time.sleep(UNDISTURBED_S)
                attack_at = time.perf_counter()
                yield target
                client.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    client.wait(ENDS_WITHIN_S)
            finally:
                client.kill()
        if out.exists():
            verdict.judge(json.loads(out.read_text()), attack_at)
        else:
            verdict.lost.append(f"an answer did not end within {ENDS_WITHIN_S:g} s after the attack")
        if target.process.poll() is None:
            target.signal(signal.SIGTERM)
        while_draining()
        if target.wait_exit(ENDS_WITHIN_S) is None:
            verdict.wrong.append(f"SIGTERM did not end the node within {ENDS_WITHIN_S:g} s")
        elif target.process.returncode != 0:
            verdict.wrong.append(f"the node ended with {target.process.returncode}")


def post(port: int, path: str, body: object, key: str = ATTACKER, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Return status and body of one POST; status 0, with the error, if there was no whole answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers(key))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


# Attacks by requests ----------------------------------------------------------------------


def big_answers(folder: Path, verdict: Verdict) -> None:
    """Request 96 choices with 20 log probabilities a token, in one piece."""
    body = {"model": MODEL, "prompt": "x", "n": 96, "max_tokens": 160, "logprobs": 20, "ignore_eos": True}
    with attacked_node(folder, verdict) as target:
        status, answer = post(target.port, "/v1/completions", body)
        verdict.conclude(f"{status}, {len(answer) / 1e6:.1f} MB")


def huge_prompts(folder: Path, verdict: Verdict) -> None:
    """Send 24 prompts of 4 MB at once, again and again, beside a client with prompts of 3,000 characters."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a" * 4_000_000}]}).encode()
    long_prompt = {"model": MODEL, "prompt": "the oak " * 375, "max_tokens": 2}
    took_s: list[float] = []
    with attacked_node(folder, verdict) as target:

        def attack(over: Event) -> None:
            while not over.is_set():
                post(target.port, "/v1/chat/completions", body)

        with attacking(attack, threads=24):
            began = time.monotonic()
            while time.monotonic() - began < 10.0:
                sent_at = time.monotonic()
                status, answer = post(target.port, "/v1/completions", long_prompt, HONEST)
                took_s.append(time.monotonic() - sent_at)
                if status != 200:
                    verdict.lost.append(f"{status}: {answer[:100]!r}")
        memory_mb = memory_max_mb(target.pid)
    result = f"a long prompt of another key took at most {max(took_s):.2f} s; VmHWM {memory_mb:.0f} MB"
    verdict.conclude(result, kept=max(took_s) <= 2.0)


def greedy_key(folder: Path, verdict: Verdict) -> None:
    """Send requests with one key for 128 choices, four at once, to an engine with 16 slots."""
    body = {"model": MODEL, "prompt": "x", "n": 128, "max_tokens": 40, "ignore_eos": True}
    # The fair share of a key is one of two: a slot is free within 40 tokens of 50 ms.
    _post_at_once(folder, verdict, [body] * 4, slots=16, engine=SIMULATED, first_ms_max=5_000)


def long_prompts(folder: Path, verdict: Verdict) -> None:
    """Send requests with one key for 100 prompts of 6,000 tokens, three at once, to an engine with 32 slots."""
    priced = SIMULATED.replace("per_prefill_token_s = 0.0", "per_prefill_token_s = 0.00005")
    bodies = []
    for client in range(3):
        prompts = [[1 + (client * 7 + number * 13 + place) % 250 for place in range(6_000)] for number in range(100)]
        bodies.append({"model": MODEL, "prompt": prompts, "max_tokens": 8, "ignore_eos": True})
    # The prompt that is being computed and one turn take a second together.
    _post_at_once(folder, verdict, bodies, slots=32, engine=priced, first_ms_max=3_000)


def _post_at_once(
    folder: Path, verdict: Verdict, bodies: list[dict[str, object]], *, slots: int, engine: str, first_ms_max: float
) -> None:
    """Post each body again and again, in a thread of its own; the other key must get its first tokens in time."""
    encoded = iter([json.dumps(body).encode() for body in bodies])
    with attacked_node(folder, verdict, slots=slots, engine=engine) as target:

        def attack(over: Event) -> None:
            data = next(encoded)
            while not over.is_set():
                if post(target.port, "/v1/completions", data)[0] != 200:
                    over.wait(0.2)

        with attacking(attack, threads=len(bodies), join=False):
            time.sleep(15.0)
    result = f"worst first token of the other key {verdict.worst_first_ms / 1000:.2f} s"
    verdict.conclude(result, kept=verdict.worst_first_ms <= first_ms_max)


# Attacks by connections: slow readers, unfinished heads, tiny frames and chunks ----------


def slow_readers(folder: Path, verdict: Verdict) -> None:
    """Read answers that fit into a backlog at 200 kB a second, with `Connection: close` and through a drain."""
    sizes = {"n": 20, "max_tokens": 100, "logprobs": 5}
    body = {"model": MODEL, "prompt": "x", "ignore_eos": True, "stream": True, **sizes}
    readers: dict[str, Future[bool]] = {}
    with (
        ThreadPoolExecutor(2) as pool,
        attacked_node(folder, verdict, while_draining=lambda: wait(readers.values())) as target,
    ):
        readers["closed"] = pool.submit(read_slowly, target.port, body, "close", 6.0)
        # This answer is whole before its client begins to read it.
        readers["drained"] = pool.submit(read_slowly, target.port, body, "keep-alive", 18.0)
        readers["closed"].result()
    whole = {name: reader.result() for name, reader in readers.items()}
    result = ", ".join(f"{name} {'whole' if is_whole else 'CUT'}" for name, is_whole in whole.items())
    verdict.conclude(result, kept=all(whole.values()))


def read_slowly(port: int, body: object, connection: str, unread_s: float) -> bool:
    """Send a request, read nothing for so long and then slowly; return whether the answer was whole."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ATTACKER}\r\n"
    head += f"content-type: application/json\r\nconnection: {connection}\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.settimeout(20.0)
        sock.connect(("127.0.0.1", port))
        sock.sendall(head.encode() + data)
        time.sleep(unread_s)
        tail = b""
        with suppress(OSError):
            while piece := sock.recv(10_000):
                tail = (tail + piece)[-64:]
                if b"[DONE]" in tail:
                    return True
                time.sleep(0.05 if len(piece) > 5_000 else 0.0)
    return False


def slow_heads(folder: Path, verdict: Verdict) -> None:
    """Keep 1,300 connections from one address with unfinished heads, and reopen closed ones."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    answered, sent = 0, 0
    with (
        attacked_node(folder, verdict) as target,
        attacking(partial(slowdown.slow_heads, target.port, count=1_300)),
    ):
        began = time.monotonic()
        while time.monotonic() - began < 12.0:
            sent += 1
            status, answer = post(target.port, "/v1/completions", body, HONEST, timeout_s=5.0)  # a connection each
            answered += status == 200
            if status != 200:
                verdict.lost.append(f"a new connection: {status} {answer[:80]!r}")
            time.sleep(0.1)
    verdict.conclude(f"{answered} of {sent} requests of another key over new connections answered")


def small_pieces(folder: Path, verdict: Verdict) -> None:
    """Send only empty WebSocket frames over 24 connections, and chunks of one byte over 24 more."""
    sent: list[int] = []
    upgrade = "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    socket_head = f"GET /v1/responses HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n{upgrade}"
    chunked_head = "POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n"
    with attacked_node(folder, verdict) as target:

        def flood(over: Event, head: str, first: bytes, pieces: bytes) -> None:
            while not over.is_set():
                with suppress(OSError), socket.create_connection(("127.0.0.1", target.port), timeout=10.0) as sock:
                    sock.sendall(f"{head}host: localhost\r\nauthorization: Bearer {ATTACKER}\r\n\r\n".encode())
                    if first:
                        sock.recv(1024)  # the handshake's response
                    sock.sendall(first)
                    while not over.is_set():
                        sock.sendall(pieces)
                        sent.append(len(pieces))

        with (
            attacking(lambda over: flood(over, socket_head, FIRST_FRAME, EMPTY_FRAMES), threads=24),
            attacking(lambda over: flood(over, chunked_head, b"", b"1\r\n \r\n" * 10_000), threads=24),
        ):
            time.sleep(12.0)
    verdict.conclude(f"{sum(sent) / 6e6:.1f} million pieces")


ATTACKS: dict[str, Attack] = {
    "big-answers": big_answers,
    "huge-prompts": huge_prompts,
    "greedy-key": greedy_key,
    "long-prompts": long_prompts,
    "slow-readers": slow_readers,
    "slow-heads": slow_heads,
    "small-pieces": small_pieces,
}


def attacks(run: Run) -> None:
    """Run the chosen attacks."""
    run.each({name: partial(attack_beside, name=name, attack=attack) for name, attack in ATTACKS.items()})
