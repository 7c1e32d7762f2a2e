"""Why links end or do not come about, in the log: each sentence once, however often there is cause to say it."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque

import trio
from attrs import Factory, define

from protocol.errors import ActorError, PeerRefused, PeerViolation

log = logging.getLogger(__name__)

SENTENCES_MAX = 512
LINES_MAX = 60  # in a window, whatever strangers think of
WINDOW_S = 60.0
FORGET_S = 600.0  # after so long without cause a sentence is news again


@define(eq=False)
class LinkLog:
    """Says what is wrong with links."""

    _said: OrderedDict[tuple[str, str], tuple[float, bool]] = Factory(OrderedDict)  # and whether the peer is to blame
    _lines: deque[float] = Factory(deque)
    _up: set[str] = Factory(set)

    def say(self, who: str, error: ActorError) -> None:
        """Log why there is no link, unless that has been said."""
        now, key = trio.current_time(), (who, str(error))
        known = self._said.pop(key, None)
        news = known is None or now - known[0] >= FORGET_S
        if news and not self._may(now):
            return  # it is still news when there is room again
        self._said[key] = now, isinstance(error, PeerViolation)
        if len(self._said) > SENTENCES_MAX:
            self._said.popitem(last=False)
        if not news:
            return
        self._up.discard(who)
        level = logging.WARNING if isinstance(error, PeerRefused | PeerViolation) else logging.INFO
        log.log(level, "no link", extra={"peer": who, "reason": str(error)})

    def linked(self, who: str) -> None:
        """Log that there is a link now; what it may lack again is news then, but no new lie of a peer that lies."""
        for key in [key for key, (_, blamed) in self._said.items() if key[0] == who and not blamed]:
            del self._said[key]
        if who not in self._up:
            self._up.add(who)
            log.info("linked", extra={"peer": who})

    def _may(self, now: float) -> bool:
        while self._lines and self._lines[0] <= now - WINDOW_S:
            self._lines.popleft()
        if len(self._lines) < LINES_MAX:
            self._lines.append(now)
            return True
        return False
