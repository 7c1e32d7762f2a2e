"""The formats of answers by their names: a new one is a file in this folder and a row here.

Names are those of an operator's file: `tools` and `reasoning` of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from actors.text.formats.answer import CallFormat, Expected, ParserStage, Thought, WholeFormat, read_answer
from actors.text.formats.deepseek import DeepSeek
from actors.text.formats.gemma4 import Gemma4
from actors.text.formats.glm import Glm
from actors.text.formats.gpt_oss import GptOss
from actors.text.formats.hermes import Hermes
from actors.text.formats.invoked_calls import MINIMAX_M2, dsml
from actors.text.formats.kimi_k2 import KimiK2
from actors.text.formats.kimi_k3 import KimiK3
from actors.text.formats.llama3 import Llama3
from actors.text.formats.minimax_m3 import MinimaxM3
from actors.text.formats.mistral import Mistral
from actors.text.formats.pythonic import Pythonic
from actors.text.formats.qwen_coder import QwenCoder
from actors.text.formats.source import Source
from actors.text.formats.stage import PLAIN, Stage

TOOLS: Mapping[str, CallFormat | WholeFormat] = {
    "deepseek-v3": DeepSeek(fenced=True),
    "deepseek-v3.1": DeepSeek(fenced=False),
    "gemma4": Gemma4(),
    "deepseek-v3.2": dsml("function_calls"),
    "deepseek-v4": dsml("tool_calls"),
    "deepseek-v4.1": dsml("calls", " "),
    "glm": Glm(),
    "gpt-oss": GptOss(),
    "hermes": Hermes(),
    "kimi-k2": KimiK2(),
    "llama3": Llama3(),
    "mistral": Mistral(),
    "kimi-k3": KimiK3(),
    "minimax-m2": MINIMAX_M2,
    "minimax-m3": MinimaxM3(),
    "pythonic": Pythonic(),
    "qwen3-coder": QwenCoder(),
}
"""Formats of calls; a whole format has reasoning of its own, too."""

# Each is told apart once: to look at all of its attributes takes a tenth of a millisecond.
WHOLE: Mapping[str, WholeFormat] = {name: each for name, each in TOOLS.items() if isinstance(each, WholeFormat)}
CALLS: Mapping[str, CallFormat] = {name: each for name, each in TOOLS.items() if not isinstance(each, WholeFormat)}

REASONING: Mapping[str, Thought] = {
    "gemma": Thought("<|channel>thought", "<channel|>", parts=("<|channel>",)),
    "granite": Thought(
        "Here is my thought process:",
        "Here is my response:",
        other_begins=("Here's my thought process:",),
        other_ends=("Here's my response:",),
    ),
    "kimi": Thought("◁think▷", "◁/think▷"),
    "minimax-m3": Thought("<mm:think>", "</mm:think>"),
    "mistral": Thought("[THINK]", "[/THINK]"),
    "qwen3": Thought("<think>", "</think>", ended_by=("<tool_call>",)),
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
    source = Source()
    if (whole := WHOLE.get(answers.tools or "")) is not None:
        return ParserStage(source, whole.read_whole(source, offer))
    calls = CALLS.get(answers.tools or "")
    thought = None if answers.reasoning is None else REASONING[answers.reasoning]
    if thought is None and (calls is None or not offer.tools):
        return PLAIN
    return ParserStage(source, read_answer(source, offer, thought, calls))


def markers(answers: AnswerFormat) -> tuple[str, ...]:
    """Return the markers of formats, which a tokenizer may have as special tokens."""
    calls = () if answers.tools is None else TOOLS[answers.tools].markers
    thought = None if answers.reasoning is None else REASONING[answers.reasoning]
    return (*calls, *(() if thought is None else thought.markers))


def thought_marks(answers: AnswerFormat) -> tuple[Sequence[str], Sequence[str]]:
    """Return the markers at the beginning of reasoning, and those at its end."""
    if (whole := WHOLE.get(answers.tools or "")) is not None:
        return whole.thought_begins, whole.thought_ends
    if answers.reasoning is None:
        return (), ()
    thought = REASONING[answers.reasoning]
    return thought.begins, thought.ends


def begins_thinking(answers: AnswerFormat, prompt: str) -> bool:
    """Return whether a prompt ends with the beginning of reasoning, by its last characters."""
    begins, _ = thought_marks(answers)
    return prompt.rstrip().endswith(tuple(begin.rstrip() for begin in begins))


def is_thinking(answers: AnswerFormat, text: str) -> bool:
    """Return whether the beginning of an answer ends within reasoning."""
    begins, ends = thought_marks(answers)
    begun = max((text.rfind(begin) for begin in begins), default=-1)
    return begun > max((text.rfind(end) for end in ends), default=-1)
