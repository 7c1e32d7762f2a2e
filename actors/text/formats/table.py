"""The formats of answers by their names: a new one is a file in this folder and a row here.

Names are those of an operator's file: `tools` and `reasoning` of a model.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from actors.text.formats.answer import CallFormat, Expected, ParserStage, Thought, WholeFormat, read_answer
from actors.text.formats.hermes import Hermes
from actors.text.formats.source import Source
from actors.text.formats.stage import PLAIN, Stage

TOOLS: Mapping[str, CallFormat | WholeFormat] = {
    "hermes": Hermes(),
}
"""Formats of calls; a whole format has reasoning of its own, too."""

REASONING: Mapping[str, Thought] = {
    "think": Thought("<think>", "</think>"),
}
"""Formats of reasoning."""


@frozen
class AnswerFormat:
    """The names of the formats of a model's answers; None for a model that writes no calls, or no reasoning."""

    tools: str | None = None
    reasoning: str | None = None


NO_FORMATS = AnswerFormat()


def make_stage(answers: AnswerFormat, offer: Expected) -> Stage:
    """Return the stage of one choice."""
    calls = None if answers.tools is None else TOOLS[answers.tools]
    source = Source()
    if isinstance(calls, WholeFormat):
        return ParserStage(source, calls.read_whole(source, offer))
    thought = None if answers.reasoning is None else REASONING[answers.reasoning]
    if thought is None and (calls is None or not offer.tools):
        return PLAIN
    return ParserStage(source, read_answer(source, offer, thought, calls))


def markers(answers: AnswerFormat) -> tuple[str, ...]:
    """Return the markers of formats, which a tokenizer may have as special tokens."""
    calls = () if answers.tools is None else TOOLS[answers.tools].markers
    thought = None if answers.reasoning is None else REASONING[answers.reasoning]
    return (*calls, *(() if thought is None else (thought.begin, thought.end)))


def begins_thinking(answers: AnswerFormat, prompt: str) -> bool:
    """Return whether a prompt ends within reasoning, by its last characters."""
    if answers.reasoning is None:
        return False
    return prompt.rstrip().endswith(REASONING[answers.reasoning].begin.rstrip())
