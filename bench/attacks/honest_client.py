"""An honest client in a process of its own, which records the gaps between the tokens of its answers.

It streams long answers one after the other, and short ones beside them. `python -m bench.attacks.honest_client PORT OUT
[--key SECRET]` runs until SIGTERM, then finishes its answers and writes `OUT`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from bench.rig.node import MODEL
from bench.rig.prompts import OAK_PROMPT

TIMEOUT_S = 60.0
SHORT_TOKENS = 4
PAUSE_S = 0.3  # between two short requests


@dataclass
class Measurements:
    """The times of the client's answers, in seconds."""

    gaps: list[tuple[float, float]] = field(default_factory=list)  # when, and the time since the token before
    firsts: list[tuple[float, float]] = field(default_factory=list)  # when, and the time to the first token
    lost: list[str] = field(default_factory=list)  # reasons of answers without a regular end
    whole: int = 0


class Client:
    """Sends requests over one kept connection and measures the answers."""

    def __init__(self, port: int, key: str, measured: Measurements, lock: Lock) -> None:
        self._port, self._key, self._measured, self._lock = port, key, measured, lock
        self._connection: HTTPConnection | None = None

    def send(self, tokens: int) -> None:
        """Request so many tokens, and record when they come."""
        try:
            self._send(tokens)
        except (OSError, HTTPException, ValueError, KeyError) as error:
            with self._lock:
                self._measured.lost.append(repr(error)[:300])
            time.sleep(PAUSE_S)
            self.connect()

    def connect(self) -> None:
        """Replace the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)

    def _send(self, tokens: int) -> None:
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        began = time.monotonic()
        self._connection.request("POST", "/v1/completions", json.dumps(body(tokens)), headers(self._key))
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {answer.read()[:200]!r}")
        last, finish, gaps = began, None, list[tuple[float, float]]()
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"])[:200])
            choice: dict[str, Any] = event["choices"][0]
            gaps.append((now, now - last))
            last, finish = now, choice["finish_reason"] or finish
        if finish != "length":
            raise ValueError(f"the answer ended in {finish}")
        with self._lock:
            self._measured.firsts.append(gaps[0])
            self._measured.gaps += gaps[1:]
            self._measured.whole += 1


def body(tokens: int) -> dict[str, Any]:
    """Return a request for exactly so many tokens; with a penalty, which a resumed request must restore."""
    exact = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True, "frequency_penalty": 0.1}
    return {"model": MODEL, "prompt": OAK_PROMPT, "return_token_ids": True, **exact}


def headers(key: str) -> dict[str, str]:
    """Return the headers of a request with this key."""
    return {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}


def main() -> int:
    """Send requests until SIGTERM, and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("out")
    parser.add_argument("--key", default="")
    parser.add_argument("--tokens", type=int, default=60, help="of each stream")
    arguments = parser.parse_args()
    measured, lock, over = Measurements(), Lock(), Event()

    def send_all(tokens: int, pause_s: float) -> None:
        client = Client(arguments.port, arguments.key, measured, lock)
        while not over.is_set():
            client.send(tokens)
            over.wait(pause_s)

    signal.signal(signal.SIGTERM, lambda *_: over.set())
    threads = [Thread(target=send_all, args=kind) for kind in ((arguments.tokens, 0.0), (SHORT_TOKENS, PAUSE_S))]
    for thread in threads:
        thread.start()
    print("started", flush=True)
    for thread in threads:
        thread.join()
    Path(arguments.out).write_text(json.dumps(asdict(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
