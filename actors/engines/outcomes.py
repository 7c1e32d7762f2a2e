"""The outcomes of calls to an engine's actor, for the metrics and the log of the engine's node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import trio

from actors.kit.calls import Call
from protocol.errors import ActorLost, AskerLeft, InternalError, RequestError
from protocol.messages.embedding import Embed, Vectors
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.media import Encode, Encoded
from protocol.trace import log_fields

log = logging.getLogger(__name__)

ENDED = "ended"
"""The outcome of a call that has its result; all others are the codes of errors."""

GenerateCall: TypeAlias = Call[Generate, Started | Tokens, Finished]
EngineCall: TypeAlias = GenerateCall | Call[Encode, Encoded, Encoded] | Call[Embed, Vectors, Vectors]


@contextmanager
def report_outcome(call: EngineCall, report: Callable[[str, float], None]) -> Iterator[None]:
    """Report how the body answers a call, and after how many seconds."""
    outcome, began_at = "", trio.current_time()
    try:
        yield
        outcome = ENDED
    except RequestError as error:
        outcome = error.code
        raise
    except Exception:
        outcome = InternalError.code
        raise
    finally:
        cancelled = AskerLeft.code if call.scope.cancel_called else ActorLost.code
        report(outcome or cancelled, trio.current_time() - began_at)


def log_outcome(call: EngineCall, event: str, outcome: str, seconds: float) -> None:
    """Log the outcome of a call with a sampled trace."""
    trace = call.request.trace
    if trace is not None and trace.followed:
        extra = {"request_id": call.request.id, **log_fields(trace), "outcome": outcome}
        log.info(event, extra={**extra, "duration_s": round(seconds, 4)})
