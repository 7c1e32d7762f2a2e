"""Conversations with tools, for the model of `tool_model.py`: what is asked, what the tools return, and what is answered.

They are the scenarios of `canitoolcall probe`, and the questions that stock clients ask in the tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from protocol.messages.text import Role, Turn
from protocol.messages.tools import Tool, ToolCall

Call = tuple[str, Mapping[str, object]]

ONE = "What is the weather in Paris?"
TWO = "What is the weather in Paris and in Tokyo?"
RECORD = "Describe Paris as a record."
WEATHER = {"Paris": "18 degrees and clear", "Tokyo": "22 degrees and rainy"}
ONE_ANSWER = "It is 18 degrees and clear in Paris. ☀"
TWO_ANSWER = "It is 18 degrees and clear in Paris, and 22 degrees and rainy in Tokyo. 東京 ☔"

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOWN = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "country", "people"],
}
TOWN_VALUE = {"city": "Paris", "country": "France", "people": 2100000}


@frozen
class Conversation:
    """The turns of a client, and the text that the model is to write behind them."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...]
    answer: str


def written_calls(*calls: Call) -> str:
    """Return calls as a model writes them."""
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
        for name, arguments in calls
    )


PROBE_ANSWERS: Mapping[str, str] = {
    "single-call": written_calls(("get_weather", {"city": "Paris"})),
    "parallel-calls": written_calls(("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tokyo"})),
    "no-call": "42",
    "nested-args": written_calls(
        (
            "create_event",
            {
                "title": "Design review",
                "start": "2026-10-01T15:00:00Z",
                "attendees": [
                    {"name": "Ana", "email": "ana@example.com"},
                    {"name": "Bo", "email": "bo@example.com"},
                ],
                "location": {"city": "Berlin", "room": "4.12"},
            },
        )
    ),
    "unicode-args": written_calls(
        ("save_note", {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"})
    ),
    "empty-args": written_calls(("get_server_time", {})),
    "forced-tool-choice": written_calls(("get_weather", {"city": "Lisbon"})),
    "tool-result-followup": "It is 18 degrees in Paris, and the sky is clear.",
    "reasoning-then-call": "<think>\n9.9 is 9.90, and 90 is more than 11.\n</think>\n\n"
    + written_calls(("record_answer", {"answer": "9.9"})),
}
"""What the model is to write in each scenario of the probe."""


def probed() -> Iterator[Conversation]:
    """Yield the scenarios of the probe with their answers."""
    from canitoolcall.probe import BUILTIN_SCENARIOS

    for scenario in BUILTIN_SCENARIOS:
        tools = tuple(_tool(each["function"]) for each in scenario.tools)
        yield Conversation(tuple(map(_turn, scenario.messages)), tools, PROBE_ANSWERS[scenario.id])


def _tool(function: Mapping[str, Any]) -> Tool:
    return Tool(function["name"], function["description"], json.dumps(function["parameters"]))


def _turn(message: Mapping[str, Any]) -> Turn:
    calls = (
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return Turn(
        Role(message["role"]),
        message["content"] or "",
        calls=tuple(calls),
        call_id=message.get("tool_call_id", ""),
    )


def asked_by_clients() -> Iterator[Conversation]:
    """Yield the conversations of the stock clients."""
    weather = (Tool("get_weather", "Tell the weather in a city.", json.dumps(CITY)),)
    for question, cities, answer in ((ONE, ["Paris"], ONE_ANSWER), (TWO, ["Paris", "Tokyo"], TWO_ANSWER)):
        user = Turn(Role.USER, question)
        calls = [("get_weather", {"city": city}) for city in cities]
        yield Conversation((user,), weather, written_calls(*calls))
        yield Conversation((user, *_results(calls)), weather, answer)
    record = (Tool("final_result", "The final response which ends this conversation", json.dumps(TOWN)),)
    yield Conversation((Turn(Role.USER, RECORD),), record, written_calls(("final_result", TOWN_VALUE)))


def _results(calls: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[Turn]:
    made = [ToolCall(f"call_{place}", name, json.dumps(arguments)) for place, (name, arguments) in enumerate(calls)]
    yield Turn(Role.ASSISTANT, "", calls=tuple(made))
    for call, (_, arguments) in zip(made, calls, strict=True):
        yield Turn(Role.TOOL, WEATHER[arguments["city"]], call_id=call.id)
