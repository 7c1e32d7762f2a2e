"""Operations of engines as clients see them: what a body may hold, and what stands for the outcomes of all engines."""

from __future__ import annotations

import json

import pytest
from attrs import evolve, frozen

from protocol.dialects.operations import failure, failure_body, outcomes_body, parse
from protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineLost,
    EngineRefused,
    InternalError,
    NotReady,
    Overloaded,
    RequestError,
    Unsupported,
)
from protocol.messages.engine import ENCODER_OPERATIONS, Done
from protocol.messages.kind import Kind, Message
from protocol.messages.operation import OperationScope
from protocol.messages.operations import OPERATION_OF, OPERATIONS, EngineMetrics, FlushCache

FLUSH = OPERATION_OF[FlushCache]
DONE = Done()


@frozen
class Resize(Message):
    """An operation with fields."""

    share: float
    levels: tuple[int, ...] = ()


RESIZE = evolve(FLUSH, kind=Kind(90, Resize, result=Done), name="resize", participle="resized")


def test_a_number_that_no_message_can_have_is_a_mistake_of_the_client() -> None:
    assert parse(RESIZE, '{"share": 1, "levels": [9223372036854775808]}') == Resize(1, (2**63,))
    with pytest.raises(BadRequest, match="64 bits"):
        parse(RESIZE, '{"share": 1, "levels": [100000000000000000000]}')


def test_no_two_operations_share_a_word_or_a_path() -> None:
    assert len({row.name for row in OPERATIONS}) == len(OPERATIONS)
    paths = [row.path for row in OPERATIONS if row.path is not None]
    assert len(set(paths)) == len(paths)
    assert all(row.path is None or row.access for row in OPERATIONS)


def test_encoders_list_the_operations_that_are_for_all() -> None:
    assert tuple(row.name for row in OPERATIONS if row.scope is OperationScope.ALL) == ENCODER_OPERATIONS


def test_a_body_has_the_fields_of_the_request_and_every_mistake_is_named() -> None:
    assert not FLUSH.has_fields
    assert RESIZE.has_fields
    assert parse(RESIZE, b'{"share": 0.5, "levels": [1, 2]}') == Resize(0.5, (1, 2))
    with pytest.raises(BadRequest, match=r"^share: is missing; level: is not a key here; did you mean levels\?$"):
        parse(RESIZE, '{"level": 3}')


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"a": DONE, "b": DONE}, None),
        ({}, None),
        ({"a": DONE, "b": InternalError("x"), "c": Overloaded("y")}, InternalError),
        ({"a": NotReady("x"), "b": DeadlineExceeded("y")}, Overloaded),
        ({"a": DONE, "b": EngineLost("x")}, NotReady),
        ({"a": NotReady("x"), "b": Unsupported("y")}, NotReady),
        ({"a": EngineRefused("x"), "b": Unsupported("y")}, BadRequest),
    ],
)
def test_one_error_stands_for_those_of_all_engines(
    outcomes: dict[str, Message | RequestError], expected: type[RequestError] | None
) -> None:
    error = failure(FLUSH, outcomes)
    assert (None if error is None else type(error)) is expected


def test_a_failure_names_the_engines_that_have_done_it_and_those_that_have_not() -> None:
    outcomes: dict[str, Message | RequestError] = {
        "a/tiny": EngineMetrics("x 1", 2),
        "b/tiny": Overloaded("requests run"),
        "c/tiny": DONE,
    }
    error = failure(RESIZE, outcomes)
    assert error is not None
    assert error.detail == "engine b/tiny was not resized: requests run; resized: a/tiny, c/tiny"
    body = json.loads(failure_body(error, outcomes))
    assert (body["error"]["message"], body["error"]["code"]) == (error.detail, "overloaded")
    assert {name: outcome for name, outcome in body["engines"].items() if name != "b/tiny"} == {
        "a/tiny": {"text": "x 1", "left_out": 2},
        "c/tiny": {},
    }
    assert body["engines"]["b/tiny"]["error"]["message"] == "requests run"


def test_results_are_a_json_object_by_engine() -> None:
    assert json.loads(outcomes_body({"a/tiny": EngineMetrics("x"), "b/tiny": DONE})) == {
        "a/tiny": {"text": "x", "left_out": 0},
        "b/tiny": {},
    }
