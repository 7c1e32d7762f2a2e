"""Structured output of stock clients on the real engine: an answer is parsed, cut by its length, or refused by name."""

from __future__ import annotations

from subprocess import CalledProcessError
from typing import Any

import pytest
from openai import BadRequestError, LengthFinishReasonError, OpenAI
from pydantic import BaseModel, ValidationError

from bench.rig.node import MODEL, Node
from bench.rig.prompts import OAK_PROMPT
from tests.rig.structured_clients import ask_all, make_environment
from tests.rig.typed_outputs import TYPES

pytestmark = pytest.mark.engine

TOKENS_MAX, TRIES = 400, 6
MESSAGES = [{"role": "user", "content": OAK_PROMPT}]
REFUSED: frozenset[str] = frozenset()  # names of types whose schema is refused


def by_chat(client: OpenAI, kind: type[BaseModel], temperature: float) -> object:
    wanted: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": temperature}
    try:
        answer = client.chat.completions.parse(**wanted, max_tokens=TOKENS_MAX, response_format=kind)
    except LengthFinishReasonError:
        return None
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.parsed


def by_responses(client: OpenAI, kind: type[BaseModel], temperature: float) -> object:
    wanted: dict[str, Any] = {"model": MODEL, "input": OAK_PROMPT, "temperature": temperature}
    try:
        with client.responses.stream(**wanted, max_output_tokens=TOKENS_MAX, text_format=kind) as stream:
            *_, last = stream
    except ValidationError as error:
        # The client reads a text that was cut as well.
        assert {each["type"] for each in error.errors()} == {"json_invalid"}  # noqa: PT017
        return None
    assert last.type == "response.completed"
    return last.response.output_parsed


@pytest.mark.parametrize("ask", [by_chat, by_responses])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_openai_parses_an_answer_of_each_type(client: OpenAI, kind: type[BaseModel], ask: Any) -> None:
    """An unbounded number may not end within the tokens that an answer may have here."""
    try:
        answers = (ask(client, kind, min(number, 1)) for number in range(TRIES))
        assert isinstance(next(answer for answer in answers if answer is not None), kind)
    except BadRequestError as error:
        assert kind.__name__ in REFUSED, error  # noqa: PT017
        assert "#/properties/" in str(error)  # noqa: PT017


@pytest.mark.nightly
def test_clients_with_structured_output_parse_an_answer_of_each_type(served: Node) -> None:
    try:
        make_environment()
    except CalledProcessError as error:
        pytest.skip(f"an environment for the clients cannot be made here: {error}")
    asked = ask_all(served.port)
    assert len(asked) == 2 * len(TYPES)
    for each in asked:
        assert each.outcomes[-1] == ("refused" if each.type in REFUSED else "parsed"), each
