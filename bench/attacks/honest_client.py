"""An honest client in a process of its own: streams without a pause and asks short questions, and notes every gap.

`python -m bench.attacks.honest_client PORT OUT [--key SECRET]` runs until SIGTERM, then finishes what runs and writes
OUT.
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

from bench.rig.prompts import OAK_PROMPT

MODEL = "tiny"
TIMEOUT_S = 60.0
SHORT_TOKENS = 4
REST_S = 0.3  # between two short questions


@dataclass
class Noted:
    """What the client noticed; times in seconds."""

    gaps: list[tuple[float, float]] = field(default_factory=list)  # when, and how long between two tokens
    firsts: list[tuple[float, float]] = field(default_factory=list)  # when, and how long to the first token
    lost: list[str] = field(default_factory=list)  # answers that did not end as they should, and why
    whole: int = 0


class Client:
    """One connection that is kept, and what comes over it."""

    def __init__(self, port: int, key: str, noted: Noted, lock: Lock) -> None:
        self._port, self._key, self._noted, self._lock = port, key, noted, lock
        self._connection: HTTPConnection | None = None

    def ask(self, tokens: int) -> None:
        """Ask for so many tokens, and note how they come."""
        try:
            self._ask(tokens)
        except (OSError, HTTPException, ValueError, KeyError) as error:
            with self._lock:
                self._noted.lost.append(repr(error)[:300])
            time.sleep(REST_S)
            self.connect()

    def connect(self) -> None:
        """Connect anew."""
        if self._connection is not None:
            self._connection.close()
        self._connection = HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)

    def _ask(self, tokens: int) -> None:
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
            self._noted.firsts.append(gaps[0])
            self._noted.gaps += gaps[1:]
            self._noted.whole += 1


def body(tokens: int) -> dict[str, Any]:
    """Return a request for exactly so many tokens; its penalty makes it one that is not easily carried on elsewhere."""
    exact = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True, "frequency_penalty": 0.1}
    return {"model": MODEL, "prompt": OAK_PROMPT, "return_token_ids": True, **exact}


def headers(key: str) -> dict[str, str]:
    """Return the headers of a request with this key."""
    return {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}


def main() -> int:
    """Ask until told to end, and write what was noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("out")
    parser.add_argument("--key", default="")
    parser.add_argument("--tokens", type=int, default=60, help="of each stream")
    arguments = parser.parse_args()
    noted, lock, over = Noted(), Lock(), Event()

    def keep(tokens: int, rest_s: float) -> None:
        client = Client(arguments.port, arguments.key, noted, lock)
        while not over.is_set():
            client.ask(tokens)
            over.wait(rest_s)

    signal.signal(signal.SIGTERM, lambda *_: over.set())
    threads = [Thread(target=keep, args=each) for each in ((arguments.tokens, 0.0), (SHORT_TOKENS, REST_S))]
    for each in threads:
        each.start()
    print("asking", flush=True)
    for each in threads:
        each.join()
    Path(arguments.out).write_text(json.dumps(asdict(noted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
