"""The launcher's record of a node over all lives of its process, and the interface of the launcher for a life."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Protocol

import trio
from attrs import define, field

from supervisor.printable import printable
from supervisor.processes.process import GracePeriods, Ladder, Process
from supervisor.telemetry.logs import Terminal


@define(eq=False)
class KeptNode:
    """The launcher's record of one node, kept over all lives of its process."""

    name: str
    ladder: Ladder  # the stop of its process; a reload may lengthen it
    watchdog_s: float  # the time without a heartbeat before it is killed
    scope: trio.CancelScope = field(factory=trio.CancelScope)  # cancelled to stop the node
    ended: trio.Event = field(factory=trio.Event)  # no further life follows
    process: Process | None = None  # the process of this life
    serving: bool = False  # its tree is up, in this life
    outdated: bool = False  # the file may have changed since this life has read it
    removed: bool = False  # no longer in the file: not started again
    failures: int = 0  # lives that ended unasked
    last_failure: str = ""

    @property
    def running(self) -> bool:
        """Whether a life of its process runs or may follow."""
        return not self.ended.is_set()

    def record_failure(self, reason: str) -> None:
        """Count a life that ended unasked."""
        self.failures += 1
        self.last_failure = reason

    def reload_if_outdated(self) -> None:
        """Send the node a reload that was requested before it was up."""
        if self.outdated and self.process is not None:
            self.outdated = False
            self.process.send_signal(signal.SIGHUP)

    def arguments(self) -> tuple[str, ...]:
        """Return the command-line arguments about earlier lives for the next one, which `status` shows."""
        # The reason comes from the node: no argument may have a zero byte or half a character, or look like an option.
        last = f"--ended-by={printable(self.last_failure)}"
        return ("--restarts", str(self.failures), last) if self.failures else ()


class NodeKeeper(Protocol):
    """The part of the launcher that a node's process needs."""

    command: Sequence[str]  # the command of a node; its name and a descriptor are appended
    environment: Mapping[str, str]
    terminal: Terminal
    grace: GracePeriods

    def announce(self, name: str, text: str) -> None:
        """Pass a node's announcement to the operator."""

    def reload(self) -> None:
        """Read the file again, on a node's request."""
