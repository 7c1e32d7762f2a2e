"""Recorded outputs of models (`canitoolcall`'s fixtures), parsed by our stages and judged by its own checks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from actors.text.formats.answer import Expected
from actors.text.formats.stage import CallPiece, Piece, ReasoningPiece, TextPiece
from actors.text.formats.table import AnswerFormat, begins_thinking, make_stage
from actors.text.formats.tool_table import ToolTable

CUTS = ("one", "token", *(f"rand:{seed}:8" for seed in range(1, 6)))  # named as the referee's own, cut by characters

FORMATS: Mapping[str, AnswerFormat] = {
    "deepseek/DeepSeek-V3-0324": AnswerFormat("deepseek-v3", "think"),
    "deepseek/DeepSeek-V3.1": AnswerFormat("deepseek-v3.1", "think"),
    "gemma4": AnswerFormat("gemma4", "gemma"),
    "glm": AnswerFormat("glm", "think"),
    "gpt-oss": AnswerFormat("gpt-oss"),
    "kimi/Kimi-K2.6": AnswerFormat("kimi-k2", "think"),
    "kimi/Kimi-K2-Instruct-0905": AnswerFormat("kimi-k2"),
    "llama/Llama-3.3-70B-Instruct": AnswerFormat("llama3"),
    "mistral": AnswerFormat("mistral", "mistral"),
    "mistral/Magistral-Small-2506": AnswerFormat("mistral", "think"),
    "deepseek/DeepSeek-V3.2": AnswerFormat("deepseek-v3.2", "think"),
    "deepseek/DeepSeek-V4-Flash": AnswerFormat("deepseek-v4", "think"),
    "deepseek/DeepSeek-V4.1-Flash": AnswerFormat("deepseek-v4.1", "think"),
    "kimi/Kimi-K3": AnswerFormat("kimi-k3"),
    "llama/Llama-4-Scout-17B-16E-Instruct": AnswerFormat("pythonic"),
    "qwen3-hermes": AnswerFormat("hermes", "think"),
    "qwen3-xml": AnswerFormat("qwen3-coder", "qwen3"),
}
"""By family, or by family and the last part of a model's name."""


def format_of(fixture: Fixture) -> AnswerFormat | None:
    """Return the format of the models of a fixture, None if there is none here."""
    named = (f"{fixture.family}/{model.rpartition('/')[2]}" for model in fixture.models)
    return next((FORMATS[name] for name in (*named, fixture.family) if name in FORMATS), None)


def offer_of(fixture: Fixture, answers: AnswerFormat) -> Expected:
    """Return what the request of a fixture offered."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools}
    prompt = fixture.generation_prompt
    if prompt is None:
        model = load_families()[fixture.family].reference_for(fixture.models[0])
        prompt = (model and model.default_generation_prompt) or ""
    return Expected(ToolTable(tools), begins_thinking(answers, prompt))


def pieces_of(fixture: Fixture, answers: AnswerFormat, parts: Iterable[str]) -> list[Piece]:
    """Return the pieces of a text that comes in these parts."""
    stage = make_stage(answers, offer_of(fixture, answers))
    pieces = [piece for part in parts for piece in stage.feed(part)]
    pieces += stage.end(cut="truncated" in fixture.tags)
    assert stage.held == 0
    return pieces


def parsed(pieces: Iterable[Piece]) -> ParseResult:
    """Return pieces as the referee reads an answer."""
    texts = {TextPiece: "", ReasoningPiece: ""}
    calls = dict[int, list[str]]()
    for piece in pieces:
        if isinstance(piece, CallPiece):
            call = calls.setdefault(piece.index, [piece.name, ""])
            call[1] += piece.arguments
        else:
            texts[type(piece)] += piece.text
    made = tuple(ParsedToolCall(name, arguments) for name, arguments in calls.values())
    return ParseResult(texts[TextPiece] or None, texts[ReasoningPiece] or None, made)


def parts_of(text: str, cut: str) -> list[str]:
    """Return the parts of a text by the name of a cut."""
    if cut in {"one", "token"}:
        return [text] if cut == "one" else [*text]
    rng, parts = random.Random(cut), list[str]()
    while text:
        size = rng.randint(1, 8)
        parts.append(text[:size])
        text = text[size:]
    return parts


def judged(fixture: Fixture, cuts: Sequence[str] = CUTS) -> tuple[Status, list[str]]:
    """Return the referee's verdict about a fixture that comes in these cuts, and its reasons."""
    answers = format_of(fixture)
    if answers is None:
        return Status.UNSUPPORTED, []
    raw = fixture.raw_output
    streams = {cut: parsed(pieces_of(fixture, answers, parts_of(raw, cut))) for cut in cuts}
    family = load_families()[fixture.family]
    rows = run_checks(fixture, family, Observation(streams["one"], streams))
    reasons = [f"{row.check} {row.strategy}: {row.detail}" for row in rows if row.status is not Status.PASS]
    return case_status(rows), reasons


def fixtures() -> Iterator[Fixture]:
    """Yield every fixture."""
    yield from load_fixtures()


if __name__ == "__main__":
    import sys

    counts = dict[str, dict[str, int]]()
    for fixture in fixtures():
        if sys.argv[1:] and not any(fixture.id.startswith(prefix) for prefix in sys.argv[1:]):
            continue
        status, reasons = judged(fixture)
        of = counts.setdefault(fixture.family, {})
        of[status.value] = of.get(status.value, 0) + 1
        if status not in {Status.PASS, Status.UNSUPPORTED}:
            print(status.value, fixture.id, *fixture.tags)
            print("   ", repr(fixture.generation_prompt), fixture.thinking, repr(fixture.raw_output))
            print("   ", *reasons[:2], sep="\n    ")
    print(json.dumps(counts, indent=1))
