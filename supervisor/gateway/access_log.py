"""The access log: one structured line for each request, without a word of its prompt or its response.

Every request is logged once: when it has ended, or when it was refused. A refused client may try again at once and as
often as it likes. So refusals have a rate limit for each error code and key: a few lines a second are written, and then
the number of dropped lines. Probes of monitors are logged at debug level.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from weakref import WeakSet

import trio
from attrs import define, field

from protocol.errors import AskerLeft, Draining, NotReady, RequestError
from protocol.trace import Trace, log_fields
from supervisor.gateway.keys.keys import ClientKey
from supervisor.telemetry.metrics import Metrics

log = logging.getLogger("espalier.requests")

LINES_PER_S = 10  # of refusals with one code, of one key
REQUEST_LINE_CHARACTERS_MAX = 128  # of the method and the path

Kind = tuple[str, str]  # an error's code, and a key's name


@define
class LineRateLimit:
    """Lets `lines_max` lines of each kind pass in one second, and counts the others; the caller passes the time in."""

    lines_max: int
    _second: int = -1
    _passed: defaultdict[Kind, int] = field(factory=lambda: defaultdict(int))
    _dropped: dict[Kind, int] = field(factory=dict)

    def passes(self, kind: Kind, now: float) -> bool:
        """Return whether one more line of this kind may be written now."""
        if int(now) != self._second:
            self._second = int(now)
            self._passed.clear()
        self._passed[kind] += 1
        if self._passed[kind] <= self.lines_max:
            return True
        self._dropped[kind] = self._dropped.get(kind, 0) + 1
        return False

    def take_dropped(self) -> Iterator[tuple[Kind, int]]:
        """Yield each kind of which lines were dropped since the last call, with their number."""
        counts, self._dropped = self._dropped, {}
        yield from counts.items()

    @property
    def has_dropped(self) -> bool:
        """Whether any line was dropped since the last `take_dropped`."""
        return bool(self._dropped)


@define(eq=False)
class AccessLog:
    """Writes the lines of the access log, and counts refusals."""

    metrics: Metrics
    _limit: LineRateLimit = field(factory=lambda: LineRateLimit(LINES_PER_S))
    _logged: WeakSet[RequestError] = field(factory=WeakSet)
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def mark_logged(self, error: RequestError) -> None:
        """Mark an error as logged with the end of its request, so that `log_refused` does not log it again."""
        self._logged.add(error)

    def replace(self, error: RequestError, shown: RequestError) -> None:
        """Let one error stand for another, which has been logged or not."""
        if error in self._logged:
            self._logged.add(shown)

    def log_ended(self, line: dict[str, object], error: RequestError | None, *, admitted: bool) -> None:
        """Log the end of a request; one that was not admitted counts as refused, and its line may be dropped."""
        if error is not None and not admitted and not self._passes(error, str(line["key"])):
            return
        log.info("request ended", extra=line)

    def log_refused(
        self,
        error: RequestError,
        *,
        request_id: str,
        request_line: str,
        key: ClientKey | None = None,
        status: int | None = None,
        trace: Trace | None = None,
        probe: bool = False,
    ) -> None:
        """Log and count an error response, unless its error has been logged with the end of its request."""
        if error in self._logged:
            return
        self._logged.add(error)
        # A probe is sent to find out exactly this.
        expected = probe and isinstance(error, NotReady | Draining)
        if expected:
            self.metrics.refused(error.code)
        if expected or self._passes(error, _name(key)):
            extra = {
                "request_id": request_id,
                **log_fields(trace),
                "key": _name(key),
                "request": _short(request_line),
                "status": status or error.http_status,
                "outcome": error.code,
                **error.log_fields,
            }
            event = "request ended" if isinstance(error, AskerLeft) else "request refused"
            log.log(logging.DEBUG if expected else logging.INFO, event, extra=extra)

    def log_answered(
        self,
        request_id: str,
        request_line: str,
        status: int,
        key: ClientKey | None,
        received_at: float,
        trace: Trace | None = None,
        *,
        probe: bool = False,
    ) -> None:
        """Log a request that was answered without a model."""
        extra = {
            "request_id": request_id,
            **log_fields(trace),
            "key": _name(key),
            "request": _short(request_line),
            "status": status,
            "outcome": "answered",
            "duration_s": round(trio.current_time() - received_at, 4),
        }
        log.log(logging.DEBUG if probe else logging.INFO, "request ended", extra=extra)

    async def run(self) -> None:
        """Log once a second how many lines were dropped, if any were; runs until cancelled."""
        while True:
            if not self._limit.has_dropped:
                await self._changed.park()
            await trio.sleep(1)
            for (code, key), count in self._limit.take_dropped():
                log.info("more were refused", extra={"key": key, "outcome": code, "count": count})

    def _passes(self, error: RequestError, key: str) -> bool:
        # A client that left was not refused.
        if not isinstance(error, AskerLeft):
            self.metrics.refused(error.code)
        passes = self._limit.passes((error.code, key), trio.current_time())
        if not passes:
            self._changed.unpark_all()
        return passes


def _name(key: ClientKey | None) -> str:
    return "-" if key is None else key.name


def _short(text: str) -> str:
    """Return a client's text in printable characters, and at most `REQUEST_LINE_CHARACTERS_MAX` of them."""
    printable = text if text.isprintable() else ascii(text)[1:-1]
    if len(printable) <= REQUEST_LINE_CHARACTERS_MAX:
        return printable
    return printable[: REQUEST_LINE_CHARACTERS_MAX - 1] + "…"
