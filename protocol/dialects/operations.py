"""Operations of engines for clients and operators: the body of a request, and the outcomes of the engines as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from protocol.dialects.http import error_object
from protocol.dialects.request_body import decode, read
from protocol.errors import BadRequest, DeadlineExceeded, InternalError, NotReady, Overloaded, RequestError
from protocol.messages.kind import Message
from protocol.messages.operation import EngineOperation
from protocol.tensors import Dtype, Tensor

Outcomes: TypeAlias = Mapping[str, Message | RequestError]
"""The result or the error of each engine, by its name in the cluster."""


def parse(operation: EngineOperation, raw: bytes | str) -> Message:
    """Return a request from the JSON object of its fields, or from a file; raises one error that lists all mistakes."""
    if operation.takes_file:
        return of_file(operation, raw.encode() if isinstance(raw, str) else raw)
    request = read(decode(raw), operation.request)
    try:
        msgspec.msgpack.encode(request)
    except OverflowError:  # no message has it, and no engine takes it
        raise BadRequest("a number has more than 64 bits") from None
    return request


def of_file(operation: EngineOperation, raw: bytes) -> Message:
    """Return a request that has a file as its only field."""
    tensor = Tensor(Dtype.UINT8, (len(raw),), memoryview(raw))
    make: Callable[[Tensor], Message] = operation.request
    return make(tensor)


def failure(operation: EngineOperation, outcomes: Outcomes) -> RequestError | None:
    """Return one error for all engines, None if each has done it.

    It is `InternalError` if one engine failed so, else `Overloaded` if one is busy or did not answer in time, else
    `BadRequest` if all refused the request, else `NotReady`. The detail names every engine with its outcome.
    """
    errors = {name: outcome for name, outcome in sorted(outcomes.items()) if isinstance(outcome, RequestError)}
    if not errors:
        return None
    done = sorted(outcomes.keys() - errors.keys())
    sentences = [f"engine {name} was not {operation.participle}: {error.detail}" for name, error in errors.items()]
    detail = "; ".join(sentences + [f"{operation.participle}: {', '.join(done)}"] * bool(done))
    if any(isinstance(error, InternalError) for error in errors.values()):
        return InternalError(detail)
    if any(isinstance(error, Overloaded | DeadlineExceeded) for error in errors.values()):
        return Overloaded(detail)
    return BadRequest(detail) if all(error.fault == "client" for error in errors.values()) else NotReady(detail)


def outcomes_body(outcomes: Outcomes) -> bytes:
    """Return the results of all engines as a JSON object by engine."""
    return msgspec.json.encode(outcomes)


def failure_body(error: RequestError, outcomes: Outcomes) -> bytes:
    """Return one error for all engines, and in `engines` the result or the error of each."""
    engines = {
        name: {"error": error_object(outcome)} if isinstance(outcome, RequestError) else outcome
        for name, outcome in outcomes.items()
    }
    return msgspec.json.encode({"error": error_object(error), "engines": engines})


def outcome_json(result: Message) -> bytes:
    """Return the fields of a result as a JSON object."""
    return msgspec.json.encode(result)
