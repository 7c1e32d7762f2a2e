"""The log of links that end or cannot be made: each reason once, however often it recurs.

A node dials again for ever, and the number of connections to it is unlimited. So a line is written only for a new
reason, and at most `LINES_MAX` a minute: strangers must not be able to fill this node's disk.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque

import trio
from attrs import Factory, define

from protocol.errors import ActorError, LocalViolation, PeerRefused, PeerViolation

log = logging.getLogger(__name__)

REASONS_MAX = 512
LINES_MAX = 60  # a window
WINDOW_S = 60.0
FORGET_S = 600.0  # without recurrence, until a reason is new again


@define(eq=False)
class LinkLog:
    """Logs new links, and the reasons why links end or cannot be made."""

    # By peer and reason: when it occurred last, and whether it was the peer's fault.
    _reasons: OrderedDict[tuple[str, str], tuple[float, bool]] = Factory(OrderedDict)
    _lines: deque[float] = Factory(deque)
    _linked: set[str] = Factory(set)

    def failed(self, peer: str, error: ActorError) -> None:
        """Log why there is no link to a peer, unless that has been logged."""
        now, key = trio.current_time(), (peer, str(error))
        previous = self._reasons.pop(key, None)
        is_new = previous is None or now - previous[0] >= FORGET_S
        if is_new and not self._take_line(now):
            return  # it stays new until there is room for a line
        self._reasons[key] = now, isinstance(error, PeerViolation)
        if len(self._reasons) > REASONS_MAX:
            self._reasons.popitem(last=False)
        if is_new:
            self._linked.discard(peer)
            log.log(_level(error), "no link", extra={"peer": peer, "reason": str(error)})

    def linked(self, peer: str) -> None:
        """Log that there is a link now. Its next loss counts as new then, but a violation of the protocol does not."""
        for key in [key for key, (_, is_violation) in self._reasons.items() if key[0] == peer and not is_violation]:
            del self._reasons[key]
        if peer not in self._linked:
            self._linked.add(peer)
            log.info("linked", extra={"peer": peer})

    def reasons(self) -> list[str]:
        """Return the remembered reasons, the latest last."""
        return [reason for _, reason in self._reasons]

    def _take_line(self, now: float) -> bool:
        while self._lines and self._lines[0] <= now - WINDOW_S:
            self._lines.popleft()
        if len(self._lines) >= LINES_MAX:
            return False
        self._lines.append(now)
        return True


def _level(error: ActorError) -> int:
    if isinstance(error, LocalViolation):
        return logging.ERROR
    return logging.WARNING if isinstance(error, PeerRefused | PeerViolation) else logging.INFO
