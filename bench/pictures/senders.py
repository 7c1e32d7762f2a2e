"""Clients that send pictures one after the other, each in a thread of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Event, Lock, Thread

from bench.rig.clients import Chat
from bench.rig.pictures import picture_body

JOIN_S = 60.0


@dataclass
class Tally:
    """The outcomes of the pictures so far."""

    outcomes: Counter[str] = field(default_factory=Counter)  # `whole`, or the code of an error
    times_s: list[float] = field(default_factory=list)  # from the first byte sent to the end of the answer
    texts: dict[str, set[str]] = field(default_factory=dict)  # the answers to each picture, by its name
    lock: Lock = field(default_factory=Lock)

    @property
    def failed(self) -> int:
        """The number of pictures that were not answered."""
        return sum(number for outcome, number in self.outcomes.items() if outcome != "whole")

    def note(self, outcome: str, took_s: float, name: str = "", text: str = "") -> None:
        """Count one picture."""
        with self.lock:
            self.outcomes[outcome] += 1
            if outcome == "whole":
                self.times_s.append(took_s)
                self.texts.setdefault(name, set()).add(text)


def send(port: int, url: str, tally: Tally, name: str = "", tokens_max: int = 4) -> None:
    """Ask about one picture, and count its answer."""
    began_at = time.perf_counter()
    try:
        outcome = Chat(port, picture_body(url, tokens_max=tokens_max)).read()
    except OSError as error:
        tally.note(type(error).__name__, 0.0)
        return
    code = "whole" if outcome.whole else str((outcome.error or {}).get("code"))
    tally.note(code, time.perf_counter() - began_at, name, outcome.text)


def send_all(port: int, pictures: Iterator[tuple[str, str]], clients: int, tally: Tally) -> None:
    """Send pictures, names and URLs, by so many clients at once, until there are no more."""
    lock = Lock()

    def run() -> None:
        while True:
            with lock:
                name, url = next(pictures, ("", ""))
            if not url:
                return
            send(port, url, tally, name)

    threads = [Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def sending(port: int, picture: Callable[[int], str], clients: int, tally: Tally) -> Iterator[None]:
    """Let so many clients send pictures while the body runs; `picture` returns the URL of one of a number."""
    stopped, numbers, lock = Event(), count(), Lock()

    def run() -> None:
        while not stopped.is_set():
            with lock:
                number = next(numbers)
            send(port, picture(number), tally, str(number))

    threads = [Thread(target=run, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join(JOIN_S)
