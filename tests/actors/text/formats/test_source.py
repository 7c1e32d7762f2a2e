"""The text of a choice as parsers read it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from actors.text.formats.source import ARGUMENTS_CHARACTERS_MAX, TRIMMED_MAX, NoCall, Reading, Source, T
from actors.text.formats.stage import CallPiece, Piece, ReasoningPiece, TextPiece

LETTERS = re.compile(r"[a-z]*")


def finished(reading: Reading[T], source: Source, *texts: str, cut: bool = False) -> T:
    """Return the result of a step while these texts come; it must not wait once they have ended."""
    coming = [*texts]
    while True:
        try:
            next(reading)
        except StopIteration as end:
            source.add("".join(coming))
            return end.value  # type: ignore[no-any-return]
        assert not source.ended
        if coming:
            source.add(coming.pop(0))
        else:
            source.ended, source.cut = True, cut


def source_of(*texts: str) -> Source:
    source = Source()
    for text in texts:
        source.add(text)
    return source


def rest(source: Source) -> str:
    """Return the text that is not taken yet."""
    return finished(source.until(), source)[0]


def pieces(source: Source) -> Sequence[Piece]:
    return source.take_pieces()


def test_a_step_waits_for_as_much_text_as_it_needs_and_not_for_more() -> None:
    source = Source()
    reading = source.need(3)
    next(reading)
    source.add("ab")
    next(reading)
    source.add("c")
    with pytest.raises(StopIteration) as end:
        next(reading)
    assert end.value.value is True
    assert finished(source.need(4), source) is False


def test_the_longest_option_counts_and_is_waited_for() -> None:
    source = Source()
    assert finished(source.accept("f", "f_2", "g"), source, "f", "_", "2x") == "f_2"
    source = Source()
    assert finished(source.accept("f", "f_2", "g"), source, "f", "_", "3") == "f"
    assert finished(source.accept("f"), source) is None
    assert rest(source) == "_3"


def test_what_is_expected_and_missing_ends_the_attempt_where_it_would_stand() -> None:
    source = source_of("abc")
    finished(source.expect("a"), source)
    with pytest.raises(NoCall):
        finished(source.expect("x", "bx"), source)
    source.fail()
    assert pieces(source) == [TextPiece("a")]


def test_a_marker_that_the_end_cut_off_belongs_to_the_attempt() -> None:
    for cut, left in ((True, []), (False, [TextPiece("a</to")])):
        source = source_of("a</to")
        finished(source.expect("a"), source)
        with pytest.raises(NoCall):
            finished(source.expect("</tool>"), source, cut=cut)
        source.fail()
        assert pieces(source) == left


def test_a_run_ends_at_another_character_or_at_its_limit() -> None:
    source = Source()
    assert finished(source.run(" \n"), source, " ", "\n", " a") == " \n "
    assert finished(source.run(" \n"), source) == ""
    assert finished(source.run("ab", 2), source, "bb") == "ab"
    assert finished(source.run_without("x", 2), source) == "b"
    source = Source()
    assert finished(source.run_without("<>", 3), source, "a", "bcd") == "abc"
    assert finished(source.run_without("<>", 3), source, "<") == "d"


def test_text_is_taken_up_to_the_first_end_and_the_longest_of_those_that_begin_there() -> None:
    source = Source()
    assert finished(source.until("[/a]", "[/", "x"), source, "1[", "[/", "a", "]2") == ("1[", "[/a]")
    source = Source()
    assert finished(source.until("[/a]", "[/"), source, "1[/", "b") == ("1", "[/")
    assert rest(source) == "b"
    source = source_of("1<")
    assert finished(source.until("<t>"), source) == ("1<", None)


def test_text_is_passed_on_as_soon_as_it_cannot_begin_an_end() -> None:
    source = source_of("An oak\n\n<")
    reading = source.pass_until(TextPiece, "<tool>", "<think>", trimmed="\n")
    next(reading)
    assert pieces(source) == [TextPiece("An oak")]
    assert source.watched == frozenset("<\n")
    source.add("b> x<too")
    next(reading)
    assert pieces(source) == [TextPiece("\n\n<b> x")]
    assert source.held == 4
    source.add("l>y")
    with pytest.raises(StopIteration) as end:
        next(reading)
    assert end.value.value == "<tool>"
    assert pieces(source) == []
    assert rest(source) == "y"


def test_a_bounded_number_of_characters_is_trimmed_and_held_back() -> None:
    for size in (1, 1000):
        source = source_of()
        reading = source.pass_until(TextPiece, "<t>", trimmed="\n")
        next(reading)
        for _ in range(1000 // size):
            source.add("\n" * size)
            next(reading)
            assert source.held <= TRIMMED_MAX
        source.add("<t>")
        with pytest.raises(StopIteration):
            next(reading)
        assert pieces(source) == [TextPiece("\n" * (1000 - TRIMMED_MAX))]


def test_an_attempt_that_fails_gives_back_its_marker_and_what_was_trimmed_before_it() -> None:
    source = source_of("a\n\n<t>b")
    assert finished(source.pass_until(TextPiece, "<t>", trimmed="\n"), source) == "<t>"
    source.begin("<t>")
    assert source.take(1) == "b"
    source.fail(ReasoningPiece)
    assert pieces(source) == [TextPiece("a"), ReasoningPiece("\n\n<t>b")]
    source.begin("<t>")
    source.fail()
    assert pieces(source) == [TextPiece("<t>")]


def test_an_attempt_that_was_cut_off_at_the_end_is_left_out() -> None:
    source = source_of("ab")
    source.ended = source.cut = True
    source.take(2)
    source.fail()
    assert pieces(source) == []


def test_a_close_leaves_out_the_white_space_and_the_marker_or_neither() -> None:
    source = Source()
    assert finished(source.close(" ", "]", ","), source, " ", " ,x") == ","
    assert finished(source.close(" ", "]"), source) is None
    assert source.held == 1
    source = source_of("  y")
    assert finished(source.close(" ", "]"), source) is None
    assert pieces(source) == [TextPiece("  ")]


def test_taken_text_can_be_read_again_between_marks() -> None:
    source = source_of("abcd")
    source.take(1)
    begin = source.mark
    source.take(1)
    source.take(1)
    assert source.between(begin, source.mark) == "bc"


def test_calls_are_numbered_and_long_arguments_have_several_pieces() -> None:
    source = Source()
    source.call("f", "{}")
    long = "x" * (2 * ARGUMENTS_CHARACTERS_MAX + 1)
    source.call("g", long)
    first, second, *more = pieces(source)
    assert (first, source.calls) == (CallPiece(0, "f", "{}"), 2)
    assert second == CallPiece(1, "g", long[:ARGUMENTS_CHARACTERS_MAX])
    assert [type(piece) for piece in more] == [CallPiece, CallPiece]


def test_pieces_of_one_kind_are_joined_between_calls() -> None:
    source = Source()
    for make, text in ((TextPiece, "a"), (TextPiece, "b"), (ReasoningPiece, "c"), (TextPiece, ""), (TextPiece, "d")):
        source.put(make, text)
    source.call("f", "{}")
    source.put(TextPiece, "e")
    assert pieces(source) == [
        TextPiece("ab"),
        ReasoningPiece("c"),
        TextPiece("d"),
        CallPiece(0, "f", "{}"),
        TextPiece("e"),
    ]


def test_a_pattern_matches_only_text_that_has_come() -> None:
    source = source_of("ab1")
    source.take(1)
    assert source.size_of(LETTERS) == 1


def test_skipped_characters_belong_to_no_piece() -> None:
    source = Source()
    finished(source.skip("\n"), source, "\n", "\n\na")
    assert (source.held, rest(source)) == (1, "a")


@pytest.mark.parametrize(
    ("text", "cut", "kept"),
    [
        ("An oak.\n<tool_c", True, "An oak."),
        ("An oak.\n<tool_c", False, "An oak.\n<tool_c"),
        ("An oak <t", True, "An oak <t"),
        ("An oak.\n", True, "An oak.\n"),
    ],
)
def test_a_marker_that_was_cut_is_left_out(text: str, cut: bool, kept: str) -> None:
    source = Source()
    assert finished(source.pass_until(TextPiece, "<tool_call>", trimmed="\n"), source, text, cut=cut) is None
    assert "".join(piece.text for piece in pieces(source) if isinstance(piece, TextPiece)) == kept
    assert source.held == 0
