"""Answers with calls that the grammar of a request's tools lets a model write, and what our own parser makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from random import Random

import numpy as np
import xgrammar
from attrs import Factory, define

from actors.text.call_grammar import HeldCalls
from actors.text.formats.answer import Expected
from actors.text.formats.stage import CallPiece, ReasoningPiece, TextPiece
from actors.text.formats.table import AnswerFormat, make_stage
from actors.text.formats.tool_table import ToolTable
from protocol.messages.tools import Tool
from tests.rig.schema_answers import END, MANNERS, answer, compiler, tokens


@cache
def compiled(tag: str) -> xgrammar.CompiledGrammar:
    """Return the compiled grammar of a structural tag; raises `RuntimeError` if the backend refuses it."""
    return compiler().compile_structural_tag(tag)


def ends(tag: str, text: str) -> bool | None:
    """Return whether an answer may end behind a text; None for a text that the grammar does not allow."""
    matcher = xgrammar.GrammarMatcher(compiled(tag))
    if not matcher.accept_string(text):
        return None
    return END in _next(matcher)


def has_to_end(tag: str, text: str) -> bool:
    """Return whether nothing may follow a text."""
    matcher = xgrammar.GrammarMatcher(compiled(tag))
    return matcher.accept_string(text) and _next(matcher) == [END]


def _next(matcher: xgrammar.GrammarMatcher) -> list[int]:
    size = len(tokens().decoded_vocab)
    mask = xgrammar.allocate_token_bitmask(1, size)
    matcher.fill_next_token_bitmask(mask)
    bits = np.unpackbits(mask.numpy().view(np.uint8).ravel(), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits[:size])]


@define
class Parsed:
    """What a client gets of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = Factory(list)


def parsed(text: str, answers: AnswerFormat, tools: Sequence[Tool], *, thinking: bool = False) -> Parsed:
    """Return an answer as the stage of its format divides it."""
    stage, found = make_stage(answers, Expected(ToolTable.of(tools), thinking)), Parsed()
    for piece in [*stage.feed(text), *stage.end()]:
        match piece:
            case TextPiece(part):
                found.text += part
            case ReasoningPiece(part):
                found.reasoning += part
            case CallPiece(index, name, arguments):
                if name:
                    found.calls.append((name, ""))
                assert index == len(found.calls) - 1
                found.calls[-1] = found.calls[-1][0], found.calls[-1][1] + arguments
    return found


def walks(held: HeldCalls, count: int, seed: int = 0) -> list[str]:
    """Return answers of so many walks through a grammar, without those that did not end."""
    rng, grammar = Random(seed), compiled(held.grammar.text)
    found = (answer(grammar, rng, MANNERS[number % len(MANNERS)]) for number in range(count))
    return [text for text in found if text is not None]


def object_of(arguments: str) -> object:
    """Return the arguments of a call as a client reads them."""
    value: object = json.loads(arguments)
    assert isinstance(value, dict)
    return value
