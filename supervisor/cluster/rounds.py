"""The rounds of an operation that several engines carry out: all of them or, where that is possible, none.

    rehearsal: would each do it? -> the operation itself -> undo, if only some have done it

An operation has a rehearsal or an undo if its row has one. What fails after a rehearsal is no refusal but a failure,
such as the end of an engine: then the others have done it, and what becomes of the failed one is the operation's own
affair (`model_weights.py` for weights).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, TypeVar

import trio

from protocol.errors import BadRequest, EngineRefused, RequestError
from protocol.messages.kind import Message
from protocol.messages.operation import EngineOperation

T = TypeVar("T")
RequestOfEach: TypeAlias = Mapping[str, Message]
"""The request to each engine, by its name in the cluster."""

AskEach: TypeAlias = Callable[[RequestOfEach], Awaitable[dict[str, T | RequestError]]]
"""A function that asks engines concurrently and returns the result or the error of each."""


async def in_rounds(
    operation: EngineOperation, requests: RequestOfEach, ask_each: AskEach[T]
) -> dict[str, T | RequestError]:
    """Have engines carry out an operation in its rounds, and return the result or the error of each."""
    await trio.lowlevel.checkpoint()
    if operation.rehearsal is not None and len(requests) > 1:
        outcomes = await ask_each({name: operation.rehearsal(request) for name, request in requests.items()})
        # An engine that is away is not waited for.
        if refused := [name for name in _failed(outcomes) if isinstance(outcomes[name], BadRequest)]:
            why = f"nothing was done, since {_all(refused)} would not have been {operation.participle}"
            return _with_results_as(EngineRefused(why), outcomes)
    outcomes = await ask_each(requests)
    failed = _failed(outcomes)
    if operation.undo is None or not failed or len(failed) == len(outcomes):
        return outcomes
    undone = await ask_each({name: operation.undo(requests[name]) for name in outcomes.keys() - set(failed)})
    why = f"it was undone, since {_all(failed)} could not be {operation.participle}"
    return outcomes | _with_results_as(EngineRefused(why), undone)


def _failed(outcomes: Mapping[str, T | RequestError]) -> list[str]:
    return sorted(name for name, outcome in outcomes.items() if isinstance(outcome, RequestError))


def _with_results_as(error: RequestError, outcomes: Mapping[str, T | RequestError]) -> dict[str, T | RequestError]:
    """Return outcomes with an error in the place of each result."""
    return {name: outcome if isinstance(outcome, RequestError) else error for name, outcome in outcomes.items()}


def _all(names: list[str]) -> str:
    return f"engine {names[0]}" if len(names) == 1 else f"engines {', '.join(names)}"
