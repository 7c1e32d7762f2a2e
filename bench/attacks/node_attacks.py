"""Attacks on one node: what its door, its logs, its descriptors and its engines bear."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event, Thread

from bench.attacks.honest_client import headers
from bench.attacks.scenario import ATTACKER, HONEST, Verdict, beside_honest_client, keys_file
from bench.rig.node import MODEL, SIMULATED, Node, node

GATEWAY = 'requests_max = 512\nwaiting_max = 1024\nkeys = "{keys}"\n'
TIMEOUT_S = 60.0
ENDS_WITHIN_S = 40.0
FIRST_FRAME, EMPTY_FRAMES = b"\x01\x80\0\0\0\0", b"\x00\x80\0\0\0\0" * 10_000  # of a message that stays empty
UNREAD_REQUESTS = 400  # a pipe is full after some 140 lines
DESCRIPTORS_MAX = 256  # as few as a node with 32 connections starts with


@contextmanager
def attacked(
    folder: Path,
    verdict: Verdict,
    *,
    slots: int = 256,
    engine: str = SIMULATED,
    more: str = "",
    prefix: Sequence[str] = (),
    output: int | None = None,
    drained: Callable[[], object] = lambda: None,
) -> Iterator[Node]:
    """Run a node with an honest client beside it while the body attacks, and end it; `drained` runs as it ends."""
    gateway = GATEWAY.format(keys=keys_file(folder)) + more
    with node(folder, slots=slots, engine=engine, gateway=gateway, prefix=prefix, output=output) as target:
        with beside_honest_client(folder, target.port, verdict):
            yield target
        if target.process.poll() is None:
            target.signal(signal.SIGTERM)
        drained()
        if target.wait_exit(ENDS_WITHIN_S) is None:
            verdict.wrong.append(f"SIGTERM did not end the node within {ENDS_WITHIN_S:g} s")
        elif target.process.returncode != 0:
            verdict.wrong.append(f"the node ended with {target.process.returncode}")


def post(port: int, path: str, body: object, key: str = ATTACKER, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Return status and body of one POST; status 0 if there was no whole answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers(key))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


def big_answers(folder: Path, verdict: Verdict) -> None:
    """Ask for 96 choices with 20 log probabilities a token, in one piece."""
    body = {"model": MODEL, "prompt": "x", "n": 96, "max_tokens": 160, "logprobs": 20, "ignore_eos": True}
    with attacked(folder, verdict) as target:
        status, answer = post(target.port, "/v1/completions", body)
        verdict.said = f"{status}, {len(answer) / 1e6:.1f} MB"


def unread_logs(folder: Path, verdict: Verdict) -> None:
    """Leave the node's standard error unread: a pipe that is full."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    reads, writes = os.pipe()
    try:
        with attacked(folder, verdict, output=writes) as target:
            answered = 0
            while answered < UNREAD_REQUESTS and post(target.port, "/v1/completions", body, timeout_s=5.0)[0] == 200:
                answered += 1
        verdict.said = f"{answered} of {UNREAD_REQUESTS} answered"
        if answered < UNREAD_REQUESTS:
            verdict.wrong.append(verdict.said)
    finally:
        os.close(reads)
        os.close(writes)


def slow_readers(folder: Path, verdict: Verdict) -> None:
    """Read answers that fit into a backlog at 200 kB a second, with `Connection: close` and through a drain."""
    body = {
        "model": MODEL,
        "prompt": "x",
        "n": 20,
        "max_tokens": 100,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
    }
    readers: dict[str, Future[bool]] = {}
    with ThreadPoolExecutor(2) as pool, attacked(folder, verdict, drained=lambda: wait(readers.values())) as target:
        readers["closed"] = pool.submit(slowly, target.port, body, "close", 6.0)
        readers["drained"] = pool.submit(slowly, target.port, body, "keep-alive", 18.0)  # it is whole before it is read
        readers["closed"].result()
    verdict.said = ", ".join(f"{how} {'whole' if reader.result() else 'CUT'}" for how, reader in readers.items())
    if "CUT" in verdict.said:
        verdict.wrong.append(verdict.said)


def slowly(port: int, body: object, connection: str, unread_s: float) -> bool:
    """Ask, read nothing for so long and then slowly, and return whether the answer was whole."""
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


def descriptors(folder: Path, verdict: Verdict) -> None:
    """Connect more strangers than a node may have descriptors, which are few, and have it reap a child meanwhile."""
    most = f"--nofile={DESCRIPTORS_MAX}:{DESCRIPTORS_MAX}"
    few = "[gateway.limits]\nconnections_max = 32\n"
    with attacked(folder, verdict, more=few, prefix=("prlimit", most)) as target:
        with ExitStack() as stack:
            strangers = 0
            for _ in range(2 * DESCRIPTORS_MAX):
                with suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", target.port), timeout=0.2))
                    strangers += 1
            for _ in range(10):
                os.kill(target.pid, signal.SIGCHLD)
                time.sleep(0.5)
        verdict.said = f"{strangers} strangers, at most {DESCRIPTORS_MAX} descriptors"


def crashing_neighbours(folder: Path, verdict: Verdict) -> None:
    """Have three engines of the same node crash again and again."""
    bad = "".join(
        f'[model.bad{number}]\npath = "{Path("examples/tiny").resolve()}"\n'
        f'[engine.bad{number}]\nmodel = "bad{number}"\nkind = "simulated"\nkv_tokens_max = 65536\n'
        f"[engine.bad{number}.simulated.faults]\ncrash_after_s = 0.3\n"
        for number in range(3)
    )
    with attacked(folder, verdict, engine=SIMULATED + bad) as target:
        time.sleep(20.0)
        verdict.said = f"{restarts(target)} restarts"


def restarts(target: Node) -> int:
    """Return how often children of a node's tree were started again, by its log: to read metrics takes a key."""
    return target.output().count('"child_event": "restarting"')


def huge_prompts(folder: Path, verdict: Verdict) -> None:
    """Send 24 prompts of 4 MB at once, again and again; an honest prompt of 3,000 characters is asked beside them."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a" * 4_000_000}]}).encode()
    honest = {"model": MODEL, "prompt": "the oak " * 375, "max_tokens": 2}
    over = Event()
    with attacked(folder, verdict) as target:

        def attack() -> None:
            while not over.is_set():
                post(target.port, "/v1/chat/completions", body)

        threads = [Thread(target=attack, daemon=True) for _ in range(24)]
        for each in threads:
            each.start()
        took: list[float] = []
        began = time.monotonic()
        while time.monotonic() - began < 10.0:
            asked = time.monotonic()
            status, said = post(target.port, "/v1/completions", honest, HONEST)
            took.append(time.monotonic() - asked)
            if status != 200:
                verdict.lost.append(f"{status}: {said[:100]!r}")
        over.set()
        for each in threads:
            each.join(TIMEOUT_S)
        rss = memory_max_mb(target.pid)
    verdict.said = f"an honest long prompt took at most {max(took):.2f} s; VmHWM {rss:.0f} MB"
    if max(took) > 2.0:
        verdict.wrong.append(verdict.said)


def memory_max_mb(pid: int) -> float:
    """Return the most memory that a process ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def greedy_key(folder: Path, verdict: Verdict) -> None:
    """Have one key ask for 128 choices at a time, four times beside each other, of an engine with 16 slots."""
    body = {"model": MODEL, "prompt": "x", "n": 128, "max_tokens": 40, "ignore_eos": True}
    over = Event()
    with attacked(folder, verdict, slots=16) as target:

        def attack() -> None:
            while not over.is_set():
                if post(target.port, "/v1/completions", body)[0] != 200:
                    over.wait(0.2)

        threads = [Thread(target=attack, daemon=True) for _ in range(4)]
        for each in threads:
            each.start()
        time.sleep(15.0)
        over.set()
    verdict.said = f"worst first token of the honest {verdict.worst_first_ms / 1000:.2f} s"
    if verdict.worst_first_ms > 5_000:  # its fair share is one of two: a slot is free within 40 tokens of 50 ms
        verdict.wrong.append(verdict.said)


def long_prompts(folder: Path, verdict: Verdict) -> None:
    """Have one key ask for 100 prompts of 6,000 tokens at a time, three times beside each other, of 32 slots."""
    priced = SIMULATED.replace("per_prefill_token_s = 0.0", "per_prefill_token_s = 0.00005")
    over = Event()
    with attacked(folder, verdict, slots=32, engine=priced) as target:

        def attack(number: int) -> None:
            prompts = [[1 + (number * 7 + each * 13 + at) % 250 for at in range(6_000)] for each in range(100)]
            body = json.dumps({"model": MODEL, "prompt": prompts, "max_tokens": 8, "ignore_eos": True}).encode()
            while not over.is_set():
                if post(target.port, "/v1/completions", body)[0] != 200:
                    over.wait(0.2)

        for number in range(3):
            Thread(target=attack, args=(number,), daemon=True).start()
        time.sleep(15.0)
        over.set()
    verdict.said = f"worst first token of the honest {verdict.worst_first_ms / 1000:.2f} s"
    if verdict.worst_first_ms > 3_000:  # the prompt that is being computed and one turn take a second together
        verdict.wrong.append(verdict.said)


def slow_heads(folder: Path, verdict: Verdict) -> None:
    """Keep 1,300 connections from one address that never finish their heads, and reopen those that end."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    over = Event()
    with attacked(folder, verdict) as target:

        def attack() -> None:
            sockets: list[socket.socket] = []
            while not over.is_set():
                while len(sockets) < 1_300 and not over.is_set():
                    with suppress(OSError):
                        fresh = socket.create_connection(("127.0.0.1", target.port), timeout=0.5)
                        fresh.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
                        fresh.setblocking(False)
                        sockets.append(fresh)
                for each in tuple(sockets):
                    with suppress(BlockingIOError):
                        try:
                            if each.recv(1024):
                                continue
                        except ConnectionError:
                            pass
                        sockets.remove(each)
                        each.close()
                over.wait(0.1)
            for each in sockets:
                each.close()

        thread = Thread(target=attack, daemon=True)
        thread.start()
        answered, asked = 0, 0
        began = time.monotonic()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        while time.monotonic() - began < 12.0:
            asked += 1
            status, said = post(target.port, "/v1/completions", body, HONEST, timeout_s=5.0)  # a connection each
            answered += status == 200
            if status != 200:
                verdict.lost.append(f"a new connection: {status} {said[:80]!r}")
            time.sleep(0.1)
        over.set()
        thread.join(10.0)
    verdict.said = f"{answered} of {asked} requests of the honest over new connections answered"


def small_pieces(folder: Path, verdict: Verdict) -> None:
    """Send nothing but empty WebSocket frames over 24 connections, and chunks of one byte over 24 more."""
    upgrade = "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    heads = {
        f"GET /v1/responses HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n{upgrade}": (
            FIRST_FRAME,
            EMPTY_FRAMES,
        ),
        "POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n": (b"", b"1\r\n \r\n" * 10_000),
    }
    over = Event()
    sent: list[int] = []

    def attack(port: int, lines: str, first: bytes, pieces: bytes) -> None:
        while not over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10.0) as sock:
                sock.sendall(f"{lines}host: localhost\r\nauthorization: Bearer {ATTACKER}\r\n\r\n".encode())
                if first:
                    sock.recv(1024)  # the handshake's answer
                sock.sendall(first)
                while not over.is_set():
                    sock.sendall(pieces)
                    sent.append(len(pieces))

    with attacked(folder, verdict) as target:
        made = [
            Thread(target=attack, args=(target.port, lines, *each), daemon=True)
            for lines, each in heads.items()
            for _ in range(24)
        ]
        for each in made:
            each.start()
        time.sleep(12.0)
        over.set()
        for each in made:
            each.join(TIMEOUT_S)
    verdict.said = f"{sum(sent) / 6e6:.1f} million pieces"
