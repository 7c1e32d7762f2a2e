"""The laws of conversations over real chat templates; skipped where `ESPALIER_TEMPLATES` names no folder of them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from protocol.errors import BadRequest, StartFailed
from protocol.messages.text import Role, Turn
from tests.rig.templates import real_templates

LETTERS = {"s": Role.SYSTEM, "d": Role.DEVELOPER, "u": Role.USER, "a": Role.ASSISTANT}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
# Each letter is a message, and a digit behind it the number of its parts.
CONVERSATIONS = (
    "u",
    "su",
    "du",
    "sdu",
    "ssu",
    "uau",
    "suau",
    "usu",
    "uasu",
    "uaau",
    "u2",
    "s2u2a2u2",
    "uas",
    "s",
    "sdsusau",
)
# It renders no conversation without variables that transformers does not set.
UNUSABLE = ("firefunction-v2",)


def talk(shape: str, sentinel: str) -> list[Turn]:
    """Return a conversation of a shape, with a sentinel in each of its texts, and nothing else."""
    numbers, turns = count(), list[Turn]()
    for letter in shape:
        texts = (sentinel.format(next(numbers)),)
        if letter.isdigit():
            turn = turns.pop()
            turns.append(Turn(turn.role, (str(turn.content), *texts), param=turn.param))
        else:
            turns.append(Turn(LETTERS[letter], texts[0], param=f"messages[{len(turns)}]"))
    return turns


def learned(file: Path) -> ConversationTemplate:
    source = file.read_text()
    for_tools = file.stem.endswith("tool_use")
    return ConversationTemplate.learned(compile_template(source, str), source, SPECIALS, for_tools=for_tools)


def outcome(template: ConversationTemplate, turns: list[Turn]) -> tuple[str, BadRequest | None]:
    try:
        return template.render(turns), None
    except BadRequest as error:
        return "", error


@pytest.mark.parametrize("sentinel", ["q{}q", "A text of some length with the number {}."], ids=["short", "long"])
@pytest.mark.parametrize("file", real_templates(), ids=lambda file: file.stem)
def test_each_text_is_in_the_prompt_or_its_message_is_refused_by_name(file: Path, sentinel: str) -> None:
    try:
        template = learned(file)
    except StartFailed:
        assert any(name in file.stem for name in UNUSABLE)
        return
    served = 0
    for shape in CONVERSATIONS:
        turns = talk(shape, sentinel)
        prompt, refusal = outcome(template, turns)
        if refusal is not None:
            assert refusal.param in {turn.param for turn in turns}, (shape, refusal)
            assert "actors" not in str(refusal)
            continue
        served += 1
        for turn in turns:
            texts = (turn.content,) if isinstance(turn.content, str) else turn.content
            assert all(text in prompt for text in texts if isinstance(text, str)), (shape, turn)
    assert served >= 4  # a user's message at least, in all forms


@pytest.mark.parametrize("file", real_templates(), ids=lambda file: file.stem)
def test_a_long_conversation_is_rendered(file: Path) -> None:
    if any(name in file.stem for name in UNUSABLE):
        return
    template = learned(file)
    assert template.cost.square < 0.05
    turns = [Turn((Role.USER, Role.ASSISTANT)[place % 2], f"text {place}") for place in range(4001)]
    assert "text 3999" in template.render(turns)
