"""Pieces of a staged text: any cut gives the same ones, and each token belongs to the piece that it ends in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.text.detokenizer import IncrementalDetokenizer
from actors.text.formats.answer import Expected
from actors.text.formats.invoked_calls import DSML
from actors.text.formats.source import CUT_MARKER_MIN
from actors.text.formats.stage import Stage
from actors.text.formats.table import AnswerFormat, make_stage
from actors.text.formats.tool_table import ToolTable
from actors.text.staged_text import PIECES_A_STEP, SCORED_A_PIECE, SCORED_HELD_MAX, StagedText
from actors.text.stop_strings import StopStrings
from protocol.messages.generation import Logprob
from protocol.messages.text import AnswerPiece, CallPart, Reasoning, Text
from protocol.messages.tools import Tool
from tests.actors.text.test_logprobs import reading
from tests.rig.gateway import TINY, ids
from tests.rig.marked_format import Marked

CALL = f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n</{DSML}invoke>\n</{DSML}tool_calls>'
WHOLE = 'Yes [th [think]an o[ak, wörld 日本[/think] hm[call f]{"a": [1]}[/call] ok [x [call g]{}'
PARTS = st.sampled_from(["[think]", "[/think]", "[call f]", "[/call]", "[", "]", "[cal", "a b", "日🙂", '{"a": 1}'])


def joined(pieces: Iterable[Any]) -> list[tuple[object, ...]]:
    """Return pieces with those of one kind and one call joined."""

    def kind(piece: Text | Reasoning | CallPart) -> tuple[type, int]:
        return type(piece), piece.index if isinstance(piece, CallPart) else -1

    out: list[tuple[object, ...]] = []
    for (of, index), group in groupby(pieces, kind):
        parts = list(group)
        text = "".join(part.arguments if isinstance(part, CallPart) else part.text for part in parts)
        names = "".join(part.name for part in parts if isinstance(part, CallPart))
        out += [(of.__name__, index, names, text)] if text or names else []
    return out


def pieces_of(text: StagedText, sequence: Sequence[int], size: int = 1) -> list[Any]:
    pieces = list[Any]()
    for start in range(0, len(sequence), size):
        part = sequence[start : start + size]
        text.take(part, [Logprob(-float(start + index)) for index in range(len(part))])
        pieces += text.give()
    text.finish()
    while text.waits:
        pieces += text.give()
    return pieces


def test_a_text_becomes_text_reasoning_and_calls() -> None:
    detokenizer = IncrementalDetokenizer(TINY.tokenizer, choice=2)
    pieces = pieces_of(StagedText(detokenizer, Marked()), ids(WHOLE))
    assert joined(pieces) == [
        ("Text", -1, "", "Yes [th "),
        ("Reasoning", -1, "", "an o[ak, wörld 日本"),
        ("Text", -1, "", " hm"),
        ("CallPart", 0, "f", '{"a": [1]}'),
        ("Text", -1, "", " ok [x "),
        ("CallPart", 1, "g", "{}"),
    ]
    assert {piece.choice for piece in pieces} == {2}
    assert sum(piece.tokens for piece in pieces) == len(ids(WHOLE))


@example([WHOLE], 1, 1)
@given(st.lists(PARTS, max_size=12), st.integers(1, 7), st.integers(1, 7))
def test_any_steps_of_an_engine_give_the_same_pieces_and_the_same_tokens(
    parts: list[str], size: int, other: int
) -> None:
    sequence = ids("".join(parts))
    one, two = (pieces_of(StagedText(reading(with_ids=True), Marked()), sequence, each) for each in (size, other))
    assert joined(one) == joined(two)
    for pieces in (one, two):
        assert [token for piece in pieces for token in piece.ids] == sequence
        logprobs = [entry.logprob for piece in pieces for entry in piece.logprobs]
        assert logprobs == [-float(index) for index in range(len(sequence))]


def test_a_token_belongs_to_the_piece_that_it_ends_in() -> None:
    text = StagedText(reading(with_ids=True), Marked())
    steps = list[tuple[str, bytes]]()
    for token in ids("a[t[think]b"):
        text.take((token,), (Logprob(-1.0),))
        if pieces := text.give():
            sent = "".join(piece.text for piece in pieces if not isinstance(piece, CallPart))
            steps.append((sent, b"".join(entry.data for piece in pieces for entry in piece.logprobs)))
    assert steps == [("a", b"a"), ("[t", b"[t"), ("b", b"[think]b")]


@pytest.mark.parametrize("last", ["[/call]", "[/think]"])
def test_tokens_behind_the_last_piece_are_sent_with_an_empty_one(last: str) -> None:
    sequence = ids("[call f]{}" + last if last == "[/call]" else "[think]x" + last)
    pieces = pieces_of(StagedText(reading(with_ids=True), Marked()), sequence)
    assert pieces[-1].text == ""
    assert [token for piece in pieces for token in piece.ids] == sequence
    unscored = pieces_of(StagedText(IncrementalDetokenizer(TINY.tokenizer), Marked()), sequence)
    assert joined(unscored) == joined(pieces)
    assert not isinstance(unscored[-1], Text), "without log probabilities and ids there is nothing to send"


def test_a_stop_string_ends_the_text_before_the_stage_sees_it() -> None:
    detokenizer = IncrementalDetokenizer(TINY.tokenizer, StopStrings(["[/"]))
    pieces = pieces_of(StagedText(detokenizer, Marked()), ids("[think]oak[/think] no"))
    assert joined(pieces) == [("Reasoning", -1, "", "oak")]
    assert detokenizer.matched == "[/"


def test_tokens_skip_the_stage_only_while_it_passes_text_through() -> None:
    assert TINY.whole_tokens is not None
    stage, table = Marked(), TINY.whole_tokens
    detokenizer = IncrementalDetokenizer(TINY.tokenizer, whole_tokens=table)
    text, pieces = StagedText(detokenizer, stage, table), list[Any]()
    line = "An oak. [think]Old oak.[/think] An oak [call f]{}[/call] An oak."
    for token in ids(line):
        if (whole := detokenizer.feed_whole(token)) is not None:
            pieces.append(whole)
        else:
            text.take((token,))
            pieces += text.give()
    text.finish()
    assert joined([*pieces, *text.give()]) == joined(pieces_of(StagedText(reading(), Marked()), ids(line)))
    seen = "".join(stage.fed)
    assert seen.startswith("[think]Old oak.[/think]")
    assert "An oak." not in seen
    assert sum(piece.tokens for piece in pieces) == len(ids(line))


def test_whole_tokens_with_a_watched_character_are_left_to_the_stage() -> None:
    assert TINY.whole_tokens is not None
    table = TINY.whole_tokens.without(frozenset("["))
    assert table is TINY.whole_tokens.without(frozenset("["))
    assert TINY.whole_tokens.without(frozenset()) is TINY.whole_tokens
    [bracket], [letter] = ids("["), ids("a")
    assert table[bracket] is None
    assert table[letter] is TINY.whole_tokens[letter] is not None


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_text_of_one_call_ends_behind_it(size: int) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    sequence = ids(f"Hm. {call} An oak. {call}")
    stage = make_stage(AnswerFormat("hermes"), Expected(ToolTable({"f": {}})))
    text = StagedText(IncrementalDetokenizer(TINY.tokenizer), stage, one_call=True)
    pieces = pieces_of(text, sequence, size)
    assert text.complete
    assert joined(pieces) == [("Text", -1, "", "Hm. "), ("CallPart", 0, "f", '{"a": 1}')]
    assert sum(piece.tokens for piece in pieces) >= len(ids(f"Hm. {call.removesuffix('</tool_call>')}"))


@pytest.mark.parametrize("behind", ["", CALL])
def test_a_call_that_is_cut_within_a_character_of_a_marker_is_left_out(behind: str) -> None:
    sequence = ids(f"{behind}{CALL}")
    texts = list[str]()
    for size in range(len(ids(behind)), len(sequence)):
        text = StagedText(reading(), make_stage(AnswerFormat("deepseek-v4"), Expected(ToolTable({"f": {}}))))
        text.take(sequence[:size], [Logprob(-1.0)] * size)
        pieces = text.give()
        text.finish(cut=True)
        while text.waits:
            pieces += text.give()
        texts.append("".join(piece.text for piece in pieces if isinstance(piece, Text)))
        assert sum(piece.tokens for piece in pieces) == size
    assert max(map(len, texts)) < CUT_MARKER_MIN
    assert not any("\ufffd" in text for text in texts)


# Turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 9, 40])
@pytest.mark.parametrize("scored", [False, True])
def test_text_keeps_up_with_an_engine_that_computes_several_tokens_a_step(size: int, scored: bool) -> None:
    """Two pieces left in a turn: with speculative decoding most of the text came at the end."""
    sequence = ids("[think]" + "An old oak. " * 40)
    text = StagedText(reading() if scored else IncrementalDetokenizer(TINY.tokenizer), Marked())
    for start in range(0, len(sequence), size):
        part = sequence[start : start + size]
        text.take(part, [Logprob(-1.0)] * len(part) if scored else ())
        replies = text.give()
        assert not text.waits
        # Without log probabilities the tokens of a step are one reply. The marker has seven tokens.
        assert len(replies) <= ((size + 7) // SCORED_A_PIECE + 1 if scored else 1)
        assert all(len(reply.logprobs) <= SCORED_A_PIECE for reply in replies)


def hermes() -> Stage:
    return make_stage(AnswerFormat("hermes"), Expected(ToolTable.of([Tool("f")])))


def turns_of_call(arguments: str, *, with_ids: bool = False) -> tuple[list[int], list[list[AnswerPiece]]]:
    """Return the tokens of a call, and the replies of each turn."""
    sequence = ids(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    text, turns = StagedText(reading(with_ids=with_ids), hermes()), list[list[AnswerPiece]]()
    for place, token in enumerate(sequence):
        text.take((token,), [Logprob(-float(place))])
        turns.append(text.give())
    text.finish()
    while text.waits:
        turns.append(text.give())
    return sequence, turns


@pytest.mark.parametrize("words", [1, 60, 900])
def test_the_log_probabilities_of_a_call_leave_over_turns_in_replies_of_a_few(words: int) -> None:
    """Those of 4,000 tokens made one reply: a chunk of 4.7 MB, which took 0.7 s of one turn."""
    sequence, turns = turns_of_call('{"a": "' + "oak " * words + '"}', with_ids=True)
    replies = [reply for turn in turns for reply in turn]
    assert max(len(reply.logprobs) for reply in replies) <= SCORED_A_PIECE
    assert max(sum(len(reply.logprobs) for reply in turn) for turn in turns) <= SCORED_A_PIECE * PIECES_A_STEP + 1
    assert [entry.logprob for reply in replies for entry in reply.logprobs] == [-float(n) for n in range(len(sequence))]
    assert [token for reply in replies for token in reply.ids] == sequence
    assert sum(reply.tokens for reply in replies) == len(sequence)
    assert joined(replies) == [("CallPart", 0, "f", json.dumps({"a": "oak " * words}))]
    calls = [reply for reply in replies if isinstance(reply, CallPart)]
    assert (calls[0].index, calls[0].name) == (0, "f")
    assert {(call.index, call.name, call.arguments) for call in calls[1:]} <= {(0, "", "")}


def test_a_stage_holds_back_a_bounded_number_of_log_probabilities() -> None:
    sequence, turns = turns_of_call('{"a": "' + "oak " * 1500 + '"}')
    given = 0
    for come, turn in enumerate(turns[: len(sequence)], start=1):
        given += sum(len(reply.logprobs) for reply in turn)
        assert come - given <= 2 * SCORED_HELD_MAX
    early = [reply for turn in turns for reply in turn if isinstance(reply, Text) and reply.logprobs]
    assert {reply.text for reply in early} == {""}
    assert len(sequence) > 2 * SCORED_HELD_MAX


def test_what_is_no_call_has_its_log_probabilities_in_its_own_replies() -> None:
    sequence, turns = turns_of_call('{"a": ' + "[" * 100)
    replies = [reply for turn in turns for reply in turn]
    assert {type(reply) for reply in replies} == {Text}
    assert "".join(reply.text for reply in replies if isinstance(reply, Text)) == TINY.tokenizer.decode(sequence)
    assert max(len(reply.logprobs) for reply in replies) <= SCORED_A_PIECE
    assert [entry.logprob for reply in replies for entry in reply.logprobs] == [-float(n) for n in range(len(sequence))]
