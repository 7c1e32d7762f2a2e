"""What the contracts of encoders and embedders have in common: work that is submitted, aborted and released."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Protocol, TypeVar

import pytest
import trio

from actors.kit.calls import Answer
from protocol.errors import RequestError
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import REQUEST_ID_LENGTH

RELEASED_WITHIN_S = 30.0
RESULT_WITHIN_S = 300.0

numbers = count(1)


class Work(Protocol):
    """What is submitted."""

    @property
    def id(self) -> str: ...


WorkT = TypeVar("WorkT", bound=Work)
WorkT_contra = TypeVar("WorkT_contra", bound=Work, contravariant=True)
Res = TypeVar("Res")
SubjectT = TypeVar("SubjectT")


class Computing(Protocol[WorkT_contra, Res]):
    """The common part of the ports of encoders and embedders."""

    def submit(self, work: WorkT_contra, /) -> Answer[Res, Res]: ...
    def abort(self, work_id: str, /) -> None: ...
    async def wait_released(self, work_id: str, /) -> None: ...
    async def load(self) -> EngineLoad: ...


def new_id() -> str:
    """Return a new id; all ids share a long prefix."""
    return f"{next(numbers):0{REQUEST_ID_LENGTH}x}"


async def check_all(
    engine: Computing[WorkT, Res], subject: SubjectT, checks: Sequence[Callable[[SubjectT], Awaitable[None]]]
) -> None:
    """Run every check; each has to leave the engine as idle as it found it."""
    await at_rest(engine)
    for check in checks:
        try:
            await check(subject)
            await at_rest(engine)
        except BaseException as error:
            error.add_note(f"while checking: {getattr(check, '__name__', check)}")
            raise


async def at_rest(engine: Computing[WorkT, Res]) -> None:
    """Wait until an engine reports that it holds nothing."""
    load = None
    with trio.move_on_after(RELEASED_WITHIN_S):
        while (load := await engine.load()) != EngineLoad(0, 0, 0):  # noqa: ASYNC110  # it can only be asked
            await trio.sleep(0.01)
    assert load == EngineLoad(0, 0, 0), f"an idle engine holds {load}"


@asynccontextmanager
async def submitted(engine: Computing[WorkT, Res], work: WorkT) -> AsyncIterator[Answer[Res, Res]]:
    """Have work in the engine for the body, as an actor does."""
    answer = engine.submit(work)
    try:
        yield answer
    finally:
        engine.abort(work.id)
        with trio.move_on_after(RELEASED_WITHIN_S, shield=True) as waiting:
            await engine.wait_released(work.id)
        assert not waiting.cancelled_caught, "it kept what was submitted"
        assert answer.over.is_set(), "a released answer is over"


async def leave(engine: Computing[WorkT, Res], work: WorkT, answer: Answer[Res, Res]) -> None:
    """Abort and wait; check that the answer is over and has no result."""
    engine.abort(work.id)
    with trio.fail_after(RELEASED_WITHIN_S):
        await engine.wait_released(work.id)
    assert answer.over.is_set()
    with pytest.raises(RequestError):
        await answer.result()


async def abort_while_computed(engine: Computing[WorkT, Res], make: Callable[[], WorkT]) -> None:
    """Check that work is released at every moment of its life; some of it may end before."""
    for pause_s in (0.0, 0.001, 0.005):
        work = make()
        answer = engine.submit(work)
        await trio.sleep(pause_s)
        if answer.over.is_set():
            continue  # too fast to be aborted
        engine.abort(work.id)
        with trio.fail_after(RELEASED_WITHIN_S):
            await engine.wait_released(work.id)
        assert answer.over.is_set()


async def abort_again(engine: Computing[WorkT, Res], make: Callable[[], WorkT]) -> None:
    """Check that a second abort changes nothing, nor one after the end, nor one of an unknown id."""
    work = make()
    answer = engine.submit(work)
    with trio.fail_after(RESULT_WITHIN_S):
        assert await answer.result() is not None
    unknown = "f" * REQUEST_ID_LENGTH
    for work_id in (work.id, work.id, unknown):
        engine.abort(work_id)
        with trio.fail_after(RELEASED_WITHIN_S):
            await engine.wait_released(work_id)
    work = make()
    answer = engine.submit(work)
    for _ in range(2):
        engine.abort(work.id)
    await leave(engine, work, answer)


async def take_again(engine: Computing[WorkT, Res], work: WorkT) -> None:
    """Check that an id can be used again after its release."""
    for _ in range(2):
        await leave(engine, work, engine.submit(work))
    async with submitted(engine, work) as answer:
        with trio.fail_after(RESULT_WITHIN_S):
            assert await answer.result() is not None
