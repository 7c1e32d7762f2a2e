"""The signals by which a process is told to end, or to read its file anew."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import trio

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def received() -> Iterator[AsyncIterator[int]]:
    """Yield those that come while the body runs. None of them ends the process by itself from then on, not even later.

    Trio gives back what was there before: a signal then ended a process that had not yet ended what it had started.
    """
    early: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: early.append(number))
    with trio.open_signal_receiver(*SIGNALS) as signals:
        for each in early:
            signal.raise_signal(each)
        yield signals
