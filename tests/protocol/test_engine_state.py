"""The states of an engine: which operation is legal in which, by all of them."""

from __future__ import annotations

from itertools import chain, combinations, product
from math import inf, nan

import pytest

from protocol.engine_state import EngineState
from protocol.errors import BadRequest, Overloaded, RequestError
from protocol.messages.leaving import ALL_TAGS, MemoryTag, RunningRequests
from protocol.messages.memory import ReleaseMemory, ResumeMemory
from protocol.messages.operations import OPERATION_OF, OPERATIONS, FlushCache, GetMetrics

RELEASE, RESUME = OPERATION_OF[ReleaseMemory], OPERATION_OF[ResumeMemory]
SETS = [frozenset(tags) for tags in chain.from_iterable(combinations(MemoryTag, size) for size in range(4))]
QUIET = [EngineState("", released, holds) for released, holds in product(SETS, (False, True)) if released or not holds]


def refusal(state: EngineState, request: ReleaseMemory | ResumeMemory | FlushCache | GetMetrics) -> RequestError | None:
    try:
        state.check(OPERATION_OF[type(request)], request)
    except RequestError as error:
        return error
    return None


def test_a_release_is_legal_for_tags_that_are_all_there_and_a_return_for_tags_that_are_all_gone() -> None:
    for state, tags in product(QUIET, SETS):
        release, resume = ReleaseMemory(tags=(*tags,)), ResumeMemory(tags=(*tags,))
        assert (refusal(state, release) is None) is (bool(tags) and not tags & state.released)
        assert (refusal(state, resume) is None) is (bool(state.released) and tags <= state.released)
        for request in (release, resume):
            assert isinstance(refusal(state, request), BadRequest | None)


def test_a_legal_operation_leads_to_a_state_with_these_tags_and_no_other() -> None:
    for state, tags, running in product(QUIET, SETS, RunningRequests):
        release, resume = ReleaseMemory(tags=(*tags,), running=running), ResumeMemory(tags=(*tags,))
        if refusal(state, release) is None:
            holds = state.holds or running is RunningRequests.HOLD
            assert state.begun(RELEASE, release) == EngineState("release-memory", state.released, holds)
            assert state.ended(release) == EngineState("", state.released | tags, holds)
        if refusal(state, resume) is None:
            left = state.released - (tags or state.released)
            assert state.begun(RESUME, resume) == EngineState("resume-memory", state.released, state.holds)
            assert state.ended(resume) == EngineState("", left, state.holds and bool(left))


def test_every_way_back_ends_in_the_first_state() -> None:
    for state, tags in product(QUIET, SETS):
        if refusal(state, resume := ResumeMemory(tags=(*tags,))) is None:
            last = state.ended(resume)
            assert (last.ended(ResumeMemory()) if last.released else last) == EngineState()


def test_while_one_operation_keeps_the_engine_out_of_service_no_other_such_one_is_legal() -> None:
    for state, running in product(QUIET, (RELEASE, RESUME)):
        busy = EngineState(running.name, state.released, state.holds)
        for operation in OPERATIONS:
            if operation.request in {ReleaseMemory, ResumeMemory}:
                error = refusal(busy, operation.request())
                assert isinstance(error, Overloaded)
                assert error.detail == f"it is out of service: {running.name} runs"


def test_an_operation_is_refused_while_memory_that_it_needs_is_released() -> None:
    for state in QUIET:
        assert (refusal(state, FlushCache()) is None) is (MemoryTag.KV_CACHE not in state.released)
        assert refusal(state, GetMetrics()) is None


@pytest.mark.parametrize("within_s", [0.0, -1.0, 3601.0, inf, nan])
def test_a_wait_without_a_limit_is_refused(within_s: float) -> None:
    error = refusal(EngineState(), ReleaseMemory(within_s=within_s))
    assert isinstance(error, BadRequest)
    assert error.param == "within_s"


@pytest.mark.parametrize(
    ("state", "service"),
    [
        (EngineState(), "in service"),
        (EngineState("resume-memory", frozenset(ALL_TAGS)), "out of service: resume-memory runs"),
        (EngineState("", frozenset(ALL_TAGS)), "out of service: memory released: kv_cache, weights, cuda_graph"),
        (
            EngineState("", frozenset({MemoryTag.WEIGHTS}), holds=True),
            "out of service: memory released: weights, requests held",
        ),
    ],
)
def test_a_state_is_named(state: EngineState, service: str) -> None:
    assert state.service == service


def test_a_refusal_names_the_tags() -> None:
    released = EngineState("", frozenset({MemoryTag.WEIGHTS}))
    twice = refusal(released, ReleaseMemory())
    assert str(twice) == "weights: released already; resume-memory returns it"
    extra = refusal(released, ResumeMemory(tags=(MemoryTag.KV_CACHE, MemoryTag.WEIGHTS)))
    assert str(extra) == "kv_cache: not released, so it cannot return"
    assert str(refusal(EngineState(), ResumeMemory())) == "no memory is released"
    assert str(refusal(EngineState(), ReleaseMemory(tags=()))) == "there is nothing to release without a tag"
