"""The access log: one structured line a request, and never a word of what was asked or answered.

Refusals are told too, but a flood of them is no flood of lines: of each kind so many a second, and then their number.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from weakref import WeakSet

import trio
from attrs import define, field

from protocol.errors import AskerLeft, Draining, NotReady, RequestError
from protocol.trace import Trace, fields
from supervisor.telemetry.metrics import Metrics

log = logging.getLogger("espalier.requests")

LINES_PER_S = 10  # of refusals with one code, of one key
WHAT_CHARACTERS_MAX = 128  # of the method and the path

Kind = tuple[str, str]  # an error's code, and a key's name


@define
class LineRateLimit:
    """Lets `lines_max` of each kind through in one second, and counts the others. Seconds come from outside."""

    lines_max: int
    _second: int = -1
    _passed: defaultdict[Kind, int] = field(factory=lambda: defaultdict(int))
    _left_out: dict[Kind, int] = field(factory=dict)

    def passes(self, kind: Kind, now: float) -> bool:
        """Return whether one more of its kind may be told now."""
        if int(now) != self._second:
            self._second = int(now)
            self._passed.clear()
        self._passed[kind] += 1
        if self._passed[kind] <= self.lines_max:
            return True
        self._left_out[kind] = self._left_out.get(kind, 0) + 1
        return False

    def left_out(self) -> Iterator[tuple[Kind, int]]:
        """Yield how many of each kind were not told since the last time, and forget them."""
        counts, self._left_out = self._left_out, {}
        yield from counts.items()

    @property
    def owes(self) -> bool:
        """Whether anything was left out and not told yet."""
        return bool(self._left_out)


@define(eq=False)
class AccessLog:
    """Tells of requests, and counts refusals."""

    metrics: Metrics
    _sieve: LineRateLimit = field(factory=lambda: LineRateLimit(LINES_PER_S))
    _logged: WeakSet[RequestError] = field(factory=WeakSet)
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def mark_logged(self, error: RequestError) -> None:
        """Take it that an error is told of with the request that it ended."""
        self._logged.add(error)

    def log_ended(self, line: dict[str, object], error: RequestError | None, *, admitted: bool) -> None:
        """Tell how a request ended, whose error has been noted; one that was not even admitted was refused."""
        if error is not None and not admitted and not self._passes(error, str(line["key"])):
            return
        log.info("request ended", extra=line)

    def log_refused(
        self,
        error: RequestError,
        *,
        request_id: str,
        what: str,
        key: str,
        status: int | None,
        trace: Trace | None = None,
        probe: bool = False,
    ) -> None:
        """Tell of a request that was refused before anybody was asked; what has been told is not told again."""
        if error in self._logged:
            return
        self._logged.add(error)
        waits = probe and isinstance(error, NotReady | Draining)  # as it is asked for: every few seconds
        if waits:
            self.metrics.refused(error.code)
        if waits or self._passes(error, key):
            extra = {
                "request_id": request_id,
                **fields(trace),
                "key": key,
                "request": _short(what),
                "status": status or error.http_status,
                "outcome": error.code,
            }
            event = "request ended" if isinstance(error, AskerLeft) else "request refused"
            log.log(logging.DEBUG if waits else logging.INFO, event, extra=extra)

    def log_answered(
        self,
        request_id: str,
        what: str,
        status: int,
        key: str,
        took_s: float,
        trace: Trace | None = None,
        *,
        probe: bool = False,
    ) -> None:
        """Tell of a request that no model was asked for; of one that machines ask every few seconds at debug level."""
        extra = {
            "request_id": request_id,
            **fields(trace),
            "key": key,
            "request": _short(what),
            "status": status,
            "outcome": "answered",
            "duration_s": round(took_s, 4),
        }
        log.log(logging.DEBUG if probe else logging.INFO, "request ended", extra=extra)

    async def run(self) -> None:
        """Tell once a second of what was left out, if anything was."""
        while True:
            if not self._sieve.owes:
                await self._news.park()
            await trio.sleep(1)
            for (code, key), count in self._sieve.left_out():
                log.info("more were refused", extra={"key": key, "outcome": code, "count": count})

    def _passes(self, error: RequestError, key: str) -> bool:
        if not isinstance(error, AskerLeft):  # whoever leaves was refused nothing
            self.metrics.refused(error.code)
        passes = self._sieve.passes((error.code, key), trio.current_time())
        if not passes:
            self._news.unpark_all()
        return passes


def _short(what: str) -> str:
    """Return what a client wrote as something that is safe to print, and no longer than a line."""
    printable = what if what.isprintable() else ascii(what)[1:-1]
    return printable if len(printable) <= WHAT_CHARACTERS_MAX else printable[: WHAT_CHARACTERS_MAX - 1] + "…"
