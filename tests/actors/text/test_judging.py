"""Calls are judged whole, by the client's own schemas, and reach nobody before that."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock

from actors.kit.offload import OFFLOAD_SIZE_MIN, Offload, run_inline
from actors.text.call_grammar import HeldCalls
from actors.text.judging import CallConformance, JudgedChoice, WrittenCall
from protocol.errors import AnswerInvalid, BadRequest
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.text import CallPart, Text

INTEGERS = '{"type":"object","properties":{"a":{"type":"integer"}}}'
GRAMMAR = Grammar(GrammarKind.STRUCTURAL_TAG, "{}")


def judge_of(schemas: dict[str, str], *, demanded: bool = False, run: Any = run_inline) -> CallConformance:
    return CallConformance(HeldCalls(GRAMMAR, schemas, demanded), Offload(run, "alice").run, lambda name: f"my {name}")


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        ([], None),
        ([("f", '{"a":1}'), ("f", "{}")], None),
        ([("free", '{"a":"1"}')], None),
        ([("f", '{"a":1}'), ("f", '{"a":"1"}')], 'a call of "f" does not keep to the schema of the tool'),
        ([("f", '{"a":')], "it is not JSON"),
    ],
)
async def test_calls_of_tools_with_a_schema_validate(
    calls: list[WrittenCall], fault: str | None, autojump_clock: MockClock
) -> None:
    judge = judge_of({"f": INTEGERS})
    if fault is None:
        await judge.judge(calls, ended=True, matched=None)
    else:
        with pytest.raises(AnswerInvalid, match=fault):
            await judge.judge(calls, ended=False, matched=None)


async def test_a_demanded_call_that_is_missing_is_an_invalid_answer_or_the_clients_own_stop(
    autojump_clock: MockClock,
) -> None:
    judge = judge_of({"f": INTEGERS}, demanded=True)
    with pytest.raises(AnswerInvalid, match="my tool_choice demands"):
        await judge.judge([], ended=True, matched=None)
    for matched, name in (("x", "my stop"), (7, "my stop_token_ids")):
        with pytest.raises(BadRequest, match=f"{name} ended") as raised:
            await judge.judge([], ended=True, matched=matched)
        assert raised.value.param == name
    await judge.judge([], ended=False, matched=None)
    await judge_of({"f": INTEGERS}).judge([], ended=True, matched=None)


@pytest.mark.parametrize(
    "schema", [INTEGERS + " " * OFFLOAD_SIZE_MIN, INTEGERS.replace('"type":"integer"', '"pattern":"a"')]
)
async def test_long_judgements_run_in_threads(schema: str, autojump_clock: MockClock) -> None:
    owners = list[str]()

    async def run(function: Any, /, *, owner: str, size: int) -> Any:
        owners.append(owner)
        return await run_inline(function, owner=owner, size=size)

    await judge_of({"f": schema}, run=run).judge([("f", '{"a":1}')], ended=True, matched=None)
    assert owners == ["alice"]


async def test_calls_and_what_comes_behind_them_wait(autojump_clock: MockClock) -> None:
    given = list[Any]()
    kept = JudgedChoice(given.append, holds_calls=True)
    pieces: list[Text | CallPart] = [
        Text("An ", 1),
        CallPart(0, "f", '{"a"', 1),
        CallPart(0, "", ":1}", 1),
        CallPart(1, "g", "{}", 1),
    ]
    for piece in [*pieces, Text("oak", 1)]:
        kept.give(piece)
    assert given == pieces[:1]
    assert kept.waits
    assert kept.texts == ["An ", "oak"]
    assert kept.calls == [("f", '{"a":1}'), ("g", "{}")]
    await kept.release()
    assert given == [*pieces, Text("oak", 1)]
    assert not kept.waits


async def test_calls_without_a_judge_do_not_wait(autojump_clock: MockClock) -> None:
    given = list[Any]()
    kept = JudgedChoice(given.append, holds_calls=False)
    kept.give(call := CallPart(0, "f", "{}", 1))
    assert given == [call]
