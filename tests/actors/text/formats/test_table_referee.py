"""Recorded outputs of models, judged by `canitoolcall`: how many of each family are read as it wants, and why not all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from canitoolcall.results import Status

from tests.rig.tool_referee import fixtures, judged

RIGHT: Mapping[str, int] = {
    "deepseek": 85,
    "gemma4": 48,
    "glm": 51,
    "gpt-oss": 51,
    "kimi": 49,
    "llama": 34,
    "mistral": 47,
    "qwen3-hermes": 50,
    "qwen3-xml": 54,
}
"""The number of outputs that are right, by family; those without a format here do not count."""

SOFT: Mapping[str, str] = {
    "gemma4/vllm-text-before-call": "the blank before a call is text: sglang's output of the same kind keeps it",
    "glm/glm45-vllm-newline-format-content-before": "the blank before a call is text",
    "glm/glm47-vllm-whitespace-only-content": "white space before a call is text",
    "qwen3-hermes/sglang-text-before-call-with-space": "the blank before a call is text",
}
"""Outputs of which the text differs in its outer white space, which the referee lets pass, each with the reason."""

WRONG: Mapping[str, str] = {}
"""Outputs that are not read as the referee wants, each with the reason."""


FEW_CUTS = ("one", "token", "rand:1:8")


def test_recorded_outputs_are_read_as_the_referee_wants() -> None:
    right, soft, wrong = Counter[str](), set[str](), dict[str, list[str]]()
    for fixture in fixtures():
        status, reasons = judged(fixture, FEW_CUTS)
        if status in {Status.PASS, Status.SOFT_PASS}:
            right[fixture.family] += 1
        if status is Status.SOFT_PASS:
            soft.add(fixture.id)
        elif status not in {Status.PASS, Status.UNSUPPORTED}:
            wrong[fixture.id] = reasons
    assert wrong.keys() == WRONG.keys(), wrong
    assert soft == SOFT.keys()
    assert right == RIGHT
