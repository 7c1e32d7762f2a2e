"""The signals for a process of ours: the first one stops it, a second one shortens the stop, and SIGHUP reloads.

A node and a launcher handle signals in the same way, so either may be what a terminal has started. SIGHUP asks for a
reload, unless it was sent because the terminal was closed: then it stops the process.
"""

from __future__ import annotations

import logging
import signal
from typing import Protocol

import trio

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalHandler(Protocol):
    """The reaction of a process to each signal; every method returns at once."""

    @property
    def hung_up(self) -> bool:
        """Whether the terminal of the process has been closed."""

    def on_reload(self) -> None:
        """Read the configuration again."""

    def on_stop(self, name: str) -> bool:
        """Begin to stop, at the signal `name`; return False if it has begun already."""

    def on_second_signal(self, number: int) -> None:
        """Shorten the stop; the exit code becomes 128 plus `number`."""


async def handle_signals(
    handler: SignalHandler, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Pass each signal to the handler until cancelled."""
    with trio.open_signal_receiver(*SIGNALS) as signals:
        accept_hang_up()
        task_status.started()
        async for number in signals:
            name = signal.Signals(number).name
            if number == signal.SIGHUP and not handler.hung_up:
                handler.on_reload()
            elif not handler.on_stop(name):
                log.warning("stopping sooner", extra={"signal": name})
                handler.on_second_signal(number)


def accept_hang_up() -> None:
    """Unblock SIGHUP, which a process begins with blocked; a pending one is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))


def ignore_signals() -> None:
    """Ignore further signals, since the process ends now with its own exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
