"""Events of supervised children: the only source of a tree's log, status and metrics."""

from __future__ import annotations

import logging
from enum import Enum

from attrs import frozen

from protocol.errors import ActorError, EspalierError

log = logging.getLogger(__name__)


class ChildEventKind(Enum):
    """An event in the life of a child, worded as the predicate of a log line."""

    STARTING = "is starting"
    STARTED = "is ready"
    ENDED = "has ended"
    FAILED = "has failed"
    RESTARTING = "will be started again"
    STOPPING = "is stopping"
    STOPPED = "has stopped"
    IGNORES_CANCEL = "does not stop, and a task cannot be killed"
    GAVE_UP = "gives up"  # a tree


@frozen
class ChildEvent:
    """One event of the child at `path` (names joined by slashes); `at` is its time on Trio's clock."""

    path: str
    kind: ChildEventKind
    at: float
    error: BaseException | None = None
    wait_s: float = 0.0  # the back-off before a restart
    took_s: float | None = None  # the time to become ready, or to stop

    def __str__(self) -> str:
        wait = f" in {self.wait_s:.3g} s" if self.wait_s else ""
        took = f" after {self.took_s:.1f} s" if self.took_s else ""
        error = "" if self.error is None else f": {error_text(self.error)}"
        return f"{self.path} {self.kind.value}{wait}{took}{error}"


def error_text(error: BaseException | None) -> str:
    """Return an error as one sentence; for a group, the sentences of its members."""
    match error:
        case None:
            return "it ended."
        case BaseExceptionGroup():
            return " | ".join(error_text(member) for member in error.exceptions)
        case EspalierError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"


def log_event(event: ChildEvent) -> None:
    """Log an event; any error but an `EspalierError` is a bug, and is logged with its traceback."""
    error = event.error
    level = logging.INFO if error is None or is_planned(error) else logging.WARNING
    if event.kind is ChildEventKind.IGNORES_CANCEL:
        level = logging.CRITICAL
    elif event.kind is ChildEventKind.GAVE_UP:
        level = logging.ERROR
    expected = error is None or _is_expected(error)
    fields = {"child": event.path, "child_event": event.kind.name.lower()}
    log.log(level, "%s", event, exc_info=None if expected else error, extra=fields)


def is_planned(error: BaseException) -> bool:
    """Whether a child has ended on purpose."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_planned, error.exceptions))
    return isinstance(error, ActorError) and error.is_planned


def _is_expected(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_expected, error.exceptions))
    return isinstance(error, EspalierError)
