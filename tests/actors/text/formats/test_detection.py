"""Formats found in chat templates, the real ones of well-known models among them."""

from __future__ import annotations

import pytest

from actors.text.formats.detection import chosen, detect
from actors.text.formats.table import AnswerFormat
from tests.rig.templates import real_templates

# By a part of a template's name, the formats that its model's authors and the servers that serve it name.
EXPECTED = {
    "DeepSeek-R1-Distill": AnswerFormat("deepseek-v3", "think"),
    "DeepSeek-V3.1": AnswerFormat("deepseek-v3.1", "think"),
    "DeepSeek-V3.2": AnswerFormat("deepseek-v3.2", "think"),
    "DeepSeek-V4": AnswerFormat("deepseek-v4", "think"),
    "GLM-4.6": AnswerFormat("glm", "think"),
    "GLM-4.7": AnswerFormat("glm", "think"),
    "Kimi-K2-Instruct": AnswerFormat("kimi-k2", None),
    "Kimi-K2-Thinking": AnswerFormat("kimi-k2", "think"),
    "Kimi-K3": AnswerFormat("kimi-k3", None),
    "MiniMax-M2": AnswerFormat("minimax-m2", "think"),
    "MiniMax-M3": AnswerFormat("minimax-m3", "minimax-m3"),
    "Mistral-Small-3.2": AnswerFormat("mistral", None),
    "Ministral-3": AnswerFormat("mistral", "mistral"),
    "QwQ": AnswerFormat("hermes", "think"),
    "Qwen2.5": AnswerFormat("hermes", None),
    "Qwen3-0.6B": AnswerFormat("hermes", "think"),
    "Qwen3-Coder": AnswerFormat("qwen3-coder", None),
    "Qwen3.5": AnswerFormat("qwen3-coder", "qwen3"),
    "meta-llama-Llama-3.1": AnswerFormat("llama3", None),
    "Llama-3.3": AnswerFormat("llama3", None),
    "gemma-2": AnswerFormat(None, None),
    "gemma-4": AnswerFormat("gemma4", "gemma"),
    "gpt-oss": AnswerFormat("gpt-oss", None),
    "Phi-3.5": AnswerFormat(None, None),
}


def test_a_template_without_markers_has_no_formats() -> None:
    assert detect("{% for m in messages %}{{ m.content }}{% endfor %}") == AnswerFormat()


def test_an_operator_may_choose() -> None:
    template = "<tool_call></think>"
    assert chosen(template, "auto", "auto") == AnswerFormat("hermes", "think")
    assert chosen(template, "none", "auto") == AnswerFormat(None, "think")
    assert chosen("", "hermes", "think") == AnswerFormat("hermes", "think")
    assert chosen(template, "auto", "none") == AnswerFormat("hermes", None)


@pytest.mark.skipif(not real_templates(), reason="ESPALIER_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("name", EXPECTED)
def test_the_formats_of_real_templates(name: str) -> None:
    paths = [path for path in real_templates() if name in path.stem]
    assert paths
    assert {detect(path.read_text()) for path in paths} == {EXPECTED[name]}
