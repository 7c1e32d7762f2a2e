"""What happens to the children of a tree, for whoever looks at it: the log, the terminal, the metrics."""

from __future__ import annotations

import logging
from enum import Enum

from attrs import frozen

from actors.kit.groups import consists_of, leaves
from protocol.errors import EspalierError

log = logging.getLogger(__name__)


class ChildEventKind(Enum):
    """What can happen to a child."""

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
    """One step in the life of the child at `path`, and when, on Trio's clock, it was taken."""

    path: str
    kind: ChildEventKind
    at: float
    error: BaseException | None = None
    wait_s: float = 0.0  # until the child is started again
    took_s: float | None = None  # to become ready, or to stop

    def __str__(self) -> str:
        wait = f" in {self.wait_s:.3g} s" if self.wait_s else ""
        took = f" after {self.took_s:.1f} s" if self.took_s else ""
        return f"{self.path} {self.kind.value}{wait}{took}{'' if self.error is None else f': {error_text(self.error)}'}"


def error_text(error: BaseException | None) -> str:
    """Say in one sentence what went wrong; of a group, what each of its errors says."""
    match error:
        case None:
            return "it ended."
        case BaseExceptionGroup():
            return " | ".join(error_text(each) for each in leaves(error))
        case EspalierError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"


def log_event(happening: ChildEvent) -> None:
    """Log a happening: what is expected to go wrong in a sentence, a bug with where it rose."""
    error = happening.error
    level = logging.INFO if error is None else logging.WARNING
    if happening.kind is ChildEventKind.IGNORES_CANCEL:
        level = logging.CRITICAL
    elif happening.kind is ChildEventKind.GAVE_UP:
        level = logging.ERROR
    expected = error is None or consists_of(error, EspalierError)  # anything else is a bug: show where it rose
    fields = {"child": happening.path, "child_event": happening.kind.name.lower()}
    log.log(level, "%s", happening, exc_info=None if expected else error, extra=fields)
