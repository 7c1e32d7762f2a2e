"""A session: its messages and tokens, what a turn adds, and the bodies by which each API is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench.load.messages import Api
from bench.turns.session import Said, Session, body
from bench.turns.text import SourceText

CALLED = (Said("system", "s"), Said("user", "u"), Said("assistant", "look", "call_1"), Said("tool", "r", "call_1"))


def session(tokenizer: Tokenizer, tokens: int = 3000, messages: int = 12) -> Session:
    return Session(SourceText(tokenizer, "1"), tokens, messages, 200)


def size(tokenizer: Tokenizer, *said: Said) -> int:
    return sum(len(tokenizer.encode(each.text, add_special_tokens=False).ids) for each in said)


def asked(api: Api, *said: Said, previous: str | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(body(api, "tiny", said, 4, previous))
    return fields


@pytest.mark.parametrize("messages", [2, 12, 40])
def test_a_first_turn_has_its_tokens_and_messages(tokenizer: Tokenizer, messages: int) -> None:
    said = session(tokenizer, messages=messages).begin()
    assert len(said) == messages
    assert size(tokenizer, *said) == pytest.approx(3000, rel=0.05)
    assert size(tokenizer, said[0]) == pytest.approx(450, abs=3)
    assert [each.role for each in said[:2]] == ["system", "user"]


def test_a_turn_adds_two_messages_of_the_new_tokens_and_changes_none(tokenizer: Tokenizer) -> None:
    grown = session(tokenizer)
    before = tuple(grown.begin())
    added = grown.grow()
    assert (tuple(grown.said), len(added)) == ((*before, *added), 2)
    assert size(tokenizer, *added) == pytest.approx(200, abs=4)


def test_most_turns_call_a_tool_and_have_its_result(tokenizer: Tokenizer) -> None:
    grown = session(tokenizer, messages=2)
    grown.begin()
    turns = [grown.grow() for _ in range(10)]
    assert [(one.role, other.role) for one, other in turns].count(("assistant", "tool")) == 8
    assert all(one.call == other.call for one, other in turns)
    assert len({one.call for one, _ in turns if one.call}) == 8


def test_a_chat_has_calls_and_results_as_openai_names_them() -> None:
    system, user, called, result = asked("chat", *CALLED)["messages"]
    assert (system, user) == ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    (call,) = called["tool_calls"]
    assert (call["id"], result["tool_call_id"], result["content"]) == ("call_1", "call_1", "r")
    assert json.loads(call["function"]["arguments"])["why"] == "look"


def test_a_response_has_calls_and_results_as_items() -> None:
    items = asked("responses", *CALLED)["input"]
    assert [item["type"] for item in items] == ["message", "message", "function_call", "function_call_output"]
    assert [item.get("call_id") for item in items] == [None, None, "call_1", "call_1"]


def test_a_websocket_sends_what_is_new_behind_the_last_response() -> None:
    fields = asked("responses-ws", CALLED[1], previous="resp_1")
    assert (fields["previous_response_id"], len(fields["input"])) == ("resp_1", 1)
    assert fields["type"] == "response.create"
    assert "stream" not in fields
    assert "previous_response_id" not in asked("responses-ws", CALLED[1])
