"""The formats of a model's answers, found by the markers in its chat template.

A template renders earlier answers as the model writes new ones, so it has the markers of its calls and its reasoning.
"""

from __future__ import annotations

import re

from actors.text.formats.table import REASONING, TOOLS, AnswerFormat

AUTO, NONE = "auto", "none"

# By format of calls, markers that a template with calls of this format has, the rarest first: Qwen's XML and GLM's
# calls stand between the markers of Hermes, too.
TOOL_MARKERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("gpt-oss", re.compile(r"<\|channel\|>")),
    ("gemma4", re.compile(r"<\|tool_call>")),
    ("kimi-k3", re.compile(r"<\|open\|>")),
    ("deepseek-v3.2", re.compile(r"\A(?=.*DSML)(?=.*function_calls>)", re.DOTALL)),
    ("deepseek-v4", re.compile(r"\A(?=.*DSML)(?=.*tool_calls>)", re.DOTALL)),
    ("deepseek-v4.1", re.compile(r"\A(?=.*DSML)(?=.* calls>)", re.DOTALL)),
    ("glm", re.compile(r"<arg_key>")),
    ("qwen3-coder", re.compile(r"\A(?=.*<tool_call>)(?=.*<function=)", re.DOTALL)),
    ("minimax-m2", re.compile(r"<minimax:tool_call>")),
    ("minimax-m3", re.compile(r"\]<\]minimax\[>\[")),
    ("kimi-k2", re.compile(r"<\|tool_calls_section_begin\|>")),
    ("deepseek-v3", re.compile(r"\A(?=.*<｜tool▁sep｜>)(?=.*```json)", re.DOTALL)),
    ("deepseek-v3.1", re.compile(r"<｜tool▁sep｜>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("pythonic", re.compile(r"<\|python_start\|>|\[func_name1\(")),
    ("llama3", re.compile(r"<\|python_tag\|>|\{\"name\": function name, \"parameters\"")),
    ("hermes", re.compile(r"<tool_call>")),
)
REASONING_MARKERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("mistral", re.compile(r"\[THINK\]")),
    ("gemma", re.compile(r"<\|channel>thought")),
    ("granite", re.compile(r"Here is my thought process:")),
    ("kimi", re.compile(r"◁think▷")),
    ("minimax-m3", re.compile(r"</mm:think>")),
    ("qwen3", re.compile(r"\A(?=.*<function=)(?=.*</think>)", re.DOTALL)),
    ("think", re.compile(r"</think>")),
)


def chosen(template: str, tools: str, reasoning: str) -> AnswerFormat:
    """Return the formats that an operator chose by name, those of `auto` found in the model's chat template."""
    found = detect(template)
    names = {AUTO: found.tools, NONE: None}, {AUTO: found.reasoning, NONE: None}
    return AnswerFormat(names[0].get(tools, tools), names[1].get(reasoning, reasoning))


def detect(template: str) -> AnswerFormat:
    """Return the formats of the answers of a model with this template."""
    tools = next((name for name, mark in TOOL_MARKERS if name in TOOLS and mark.search(template)), None)
    reasoning = next((name for name, mark in REASONING_MARKERS if name in REASONING and mark.search(template)), None)
    return AnswerFormat(tools, reasoning)
