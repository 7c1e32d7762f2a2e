"""Attacks on one node by connections: slow readers, unfinished heads, tiny frames and chunks."""

from __future__ import annotations

import json
import resource
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Event

from bench.faults.attacks import ATTACKER, HONEST, Attack, Verdict, attacked_node, post
from bench.faults.slowdown import attacking
from bench.rig.node import MODEL

FIRST_FRAME, EMPTY_FRAMES = b"\x01\x80\0\0\0\0", b"\x00\x80\0\0\0\0" * 10_000  # of a message that stays empty


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
    """Keep 1,300 connections from one address that never finish their heads, and reopen those that end."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    answered, sent = 0, 0
    with attacked_node(folder, verdict) as target, attacking(lambda over: _hold_heads(target.port, over)):
        began = time.monotonic()
        while time.monotonic() - began < 12.0:
            sent += 1
            status, answer = post(target.port, "/v1/completions", body, HONEST, timeout_s=5.0)  # a connection each
            answered += status == 200
            if status != 200:
                verdict.lost.append(f"a new connection: {status} {answer[:80]!r}")
            time.sleep(0.1)
    verdict.conclude(f"{answered} of {sent} requests of another key over new connections answered")


def _hold_heads(port: int, over: Event) -> None:
    sockets: list[socket.socket] = []
    while not over.wait(0.1):
        while len(sockets) < 1_300 and not over.is_set():
            with suppress(OSError):
                fresh = socket.create_connection(("127.0.0.1", port), timeout=0.5)
                fresh.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
                fresh.setblocking(False)
                sockets.append(fresh)
        for sock in tuple(sockets):
            if _has_ended(sock):
                sockets.remove(sock)
                sock.close()
    for sock in sockets:
        sock.close()


def _has_ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1024)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


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


BY_CONNECTIONS: dict[str, Attack] = {
    "slow-readers": slow_readers,
    "slow-heads": slow_heads,
    "small-pieces": small_pieces,
}
