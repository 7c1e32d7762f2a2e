"""An honest client in a process of its own, which records the gaps between the tokens of its answers.

It streams long answers one after the other, and short ones beside them. `python -m bench.faults.honest_client PORT OUT
KEY` runs until SIGTERM, then finishes its answers and writes `OUT`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

from bench.rig.clients import Chat, chat_body
from bench.rig.prompts import OAK_PROMPT

TOKENS, SHORT_TOKENS = 60, 4
PAUSE_S = 0.3  # between two short requests

Measurements = dict[str, list[Any]]
"""`gaps` and `firsts`: when, and the time since the token before or the request; `lost`: reasons of answers without a
regular end; `whole`: when each answer was. In seconds of `perf_counter`, which is the same for all processes."""


def measure(port: int, key: str, tokens: int, measured: Measurements) -> None:
    """Request exactly so many tokens, and record when they come, or why the answer did not end regularly."""
    began = time.perf_counter()
    try:
        chat = Chat(port, chat_body(OAK_PROMPT, tokens), key)
    except OSError as error:
        measured["lost"].append(repr(error)[:300])
        return
    outcome = chat.read()
    if outcome.status != 200 or outcome.error is not None or outcome.finish != "length" or not outcome.times:
        measured["lost"].append(f"{outcome.status}: {outcome.error or outcome.finish}"[:300])
        return
    measured["firsts"].append((outcome.times[0], outcome.times[0] - began))
    measured["gaps"] += [(now, now - last) for last, now in pairwise(outcome.times)]
    measured["whole"].append(outcome.ended_at)


def main(port: str, out: str, key: str) -> None:
    """Send requests until SIGTERM, and write the measurements."""
    measured: Measurements = {"gaps": [], "firsts": [], "lost": [], "whole": []}
    over = Event()

    def send_all(count: int, pause_s: float) -> None:
        while not over.is_set():
            lost = len(measured["lost"])
            measure(int(port), key, count, measured)
            over.wait(pause_s if len(measured["lost"]) == lost else PAUSE_S)

    signal.signal(signal.SIGTERM, lambda *_: over.set())
    threads = [Thread(target=send_all, args=each) for each in ((TOKENS, 0.0), (SHORT_TOKENS, PAUSE_S))]
    for thread in threads:
        thread.start()
    print("started", flush=True)
    for thread in threads:
        thread.join()
    Path(out).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
