"""The text of an answer is the same however its tokens arrive, and no part of a stop string is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from actors.text.detokenizer import HELD_IDS_MAX, IncrementalDetokenizer
from actors.text.stop_strings import StopStrings
from actors.text.whole_tokens import WholeTokens
from protocol.messages.text import Text

BROKEN = "\N{REPLACEMENT CHARACTER}"
TINY = Tokenizer.from_file(str(Path(__file__).parents[3] / "examples" / "tiny" / "tokenizer.json"))
BYTES = {TINY.id_to_token(token): token for token in range(TINY.get_vocab_size())}
EOS, PAD = 2, 0

LETTERS = "abc EN D.\n éüñß 日本語中文 한글 🙂👩‍👩‍👧🇩🇪 \u0301\u200d"
texts = st.text(st.sampled_from(LETTERS), max_size=20).map(lambda text: normalize("NFC", text))  # as the tokenizer does
id_lists = st.lists(st.integers(0, TINY.get_vocab_size() - 1), max_size=24)
answers = st.one_of(texts.map(lambda text: TINY.encode(text, add_special_tokens=False).ids), id_lists)
stop_lists = st.lists(st.text(st.sampled_from("abEND 日本é🙂"), min_size=1, max_size=4), max_size=4)


def ids(text: str) -> list[int]:
    return TINY.encode(text, add_special_tokens=False).ids


def cut(sequence: list[Any], sizes: list[int]) -> Iterator[list[int]]:
    """Split a list into pieces of these sizes, over and over."""
    start, turn = 0, 0
    while start < len(sequence):
        size = sizes[turn % len(sizes)]
        yield sequence[start : start + size]
        start, turn = start + size, turn + 1


def read(reading: IncrementalDetokenizer, pieces: Iterator[list[int]] | Sequence[Any]) -> tuple[str, list[Text]]:
    results = [*[reading.feed(piece) for piece in pieces], reading.finish()]
    pieces_read = [text for text in results if text is not None]
    return "".join(text.text for text in pieces_read), pieces_read


def sound(text: str) -> str:
    """The text without a character at its end that is not whole yet."""
    return text.rstrip(BROKEN) if text.endswith(BROKEN) else text


def naively(
    sequence: list[int], stops: list[str], stop_ids: list[int], silent: set[int], tokens_min: int
) -> tuple[str, Any, int]:
    """The slow way: decode everything up to each token anew, and look for every stop in all of it."""
    kept: list[int] = []
    for count, token in enumerate(sequence, start=1):
        early = count <= tokens_min
        if token in stop_ids and not early:
            return TINY.decode(kept), token, count
        kept += [] if token in silent else [token]
        text = sound(TINY.decode(kept))
        if early:
            start = len(text)
        elif (hit := first_stop(text, stops, start if tokens_min else 0)) is not None:
            return text[: hit[0]], hit[1], count
    text = TINY.decode(kept)
    hit = first_stop(text, stops, start if tokens_min else 0) if len(sequence) > tokens_min else None
    return (text, None, len(sequence)) if hit is None else (text[: hit[0]], hit[1], len(sequence))


def first_stop(text: str, stops: list[str], start: int) -> tuple[int, str] | None:
    for end in range(start + 1, len(text) + 1):
        ended = [stop for stop in stops if text[start:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return end - len(longest), longest
    return None


# Detokenising --------------------------------------------------------------------------


@given(answers, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_split_of_the_ids_reads_as_in_one_piece(sequence: list[int], sizes: list[Any]) -> None:
    text, pieces = read(IncrementalDetokenizer(TINY), cut(sequence, sizes))
    assert text == TINY.decode(sequence)
    assert sum(piece.tokens for piece in pieces) <= len(sequence)


@given(texts)
def test_a_character_is_never_split(text: str) -> None:
    so_far = ""
    reading = IncrementalDetokenizer(TINY)
    for token in ids(text):
        piece = reading.feed([token])
        so_far += piece.text if piece else ""
        assert BROKEN not in so_far
        assert text.startswith(so_far)
    assert so_far == text
    assert reading.finish() is None


def test_bytes_that_are_no_text_are_not_held_for_ever() -> None:
    reading = IncrementalDetokenizer(TINY)
    results = [reading.feed([BYTES["ĥ"]]) for _ in range(10 * HELD_IDS_MAX)]
    given = "".join(text.text for text in results if text is not None)
    assert 0 <= 10 * HELD_IDS_MAX - len(given) <= HELD_IDS_MAX + 3
    smile = [reading.feed([BYTES[letter]]) for letter in "ðŁĻĤ"]
    assert smile[-1] is not None
    assert smile[-1].text.endswith("🙂")


@given(st.lists(st.sampled_from([*[BYTES[letter] for letter in "ðŁĻĤæĹ¥Ã©"], *ids("a")]), max_size=120))
def test_long_runs_of_broken_bytes_read_as_in_one_piece(sequence: list[Any]) -> None:
    assert read(IncrementalDetokenizer(TINY), cut(sequence, [1]))[0] == TINY.decode(sequence)


# A tokenizer that strips the first space and spells what it does not know in bytes ------


def sentencepiece() -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁a", "a", "▁the", "é", "日", "▁日本", "END", "EN", "D", "▁▁", "▁END"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


SENTENCEPIECE = sentencepiece()
WORDS = range(259, SENTENCEPIECE.get_vocab_size())


def spelled(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


@given(
    st.lists(st.one_of(st.sampled_from(WORDS).map(lambda word: [word]), texts.map(spelled), st.just([1])), max_size=9)
)
def test_words_and_spelled_characters_read_as_in_one_piece(pieces: list[Any]) -> None:
    sequence = [token for piece in pieces for token in piece]
    assert read(IncrementalDetokenizer(SENTENCEPIECE), cut(sequence, [1]))[0] == SENTENCEPIECE.decode(sequence)


@given(st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1), max_size=40))
@example([4, 195, 110, 216, 14, 270, 113])
@example([118, 207, 262, 176])
def test_no_sequence_of_ids_raises(sequence: list[Any]) -> None:
    text, _ = read(IncrementalDetokenizer(SENTENCEPIECE), cut(sequence, [1]))
    assert len(text) <= 4 * len(SENTENCEPIECE.decode(sequence)) + 4


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["a"], ["▁the", "END"], " theEND"),
        (["▁the"] * 9, ["▁a", "▁the"], " a the"),
        (["a"], ["a", "▁a"], "a a"),
        (["a", "</s>"], ["▁the"], " the"),
        (["</s>"], ["▁the", "▁a"], "the a"),
        (["<0xC3>"], ["▁the"], "the"),
    ],
)
def test_the_first_word_of_an_answer_keeps_its_space_behind_a_prompt(
    prompt: list[str], answer: list[str], text: str
) -> None:
    of_word = SENTENCEPIECE.get_vocab()
    before, after = ([of_word[word] for word in words] for words in (prompt, answer))
    assert read(IncrementalDetokenizer(SENTENCEPIECE, prompt=before), cut(after, [1]))[0] == text


def test_the_prompt_of_a_byte_level_model_is_not_decoded_again() -> None:
    reading = IncrementalDetokenizer(TINY, whole_tokens=WholeTokens(TINY, ()), prompt=ids("é")[:-1])
    assert read(reading, cut(ids(" a"), [1]))[0] == " a"


def test_a_word_keeps_its_space_after_broken_bytes() -> None:
    the = SENTENCEPIECE.token_to_id("▁the")
    text, _ = read(IncrementalDetokenizer(SENTENCEPIECE), cut([3 + 0xCC, the, 3 + 0xAD, the], [1]))
    assert text == f"{BROKEN} the{BROKEN} the"


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (["</s>", "▁the", "a"], "</s> thea"),
        (["▁the", "</s>", "▁a", "</s>", "</s>", "END"], "the</s> a</s></s>END"),
        (["</s>", "▁", "▁the"], "</s>  the"),
        (["</s>", "<s>", "▁the", "<s>", "▁a"], "</s> the a"),
        (["<0xC3>", "</s>", "<0xC3>", "<0xA9>", "▁the"], f"{BROKEN}</s>é the"),
        (["</s>", *["<s>"] * 2 * HELD_IDS_MAX, "▁the"], "</s> the"),
    ],
)
def test_a_word_keeps_its_space_behind_a_marker(answer: list[str], text: str, size: int) -> None:
    of_word = SENTENCEPIECE.get_vocab()
    reading = IncrementalDetokenizer(SENTENCEPIECE, markers={of_word["</s>"]: "</s>"})
    assert read(reading, cut([of_word[word] for word in answer], [size]))[0] == text


# Stops -----------------------------------------------------------------------------------


@given(
    answers,
    stop_lists,
    st.lists(st.integers(0, TINY.get_vocab_size() - 1), max_size=2),
    st.sets(st.sampled_from([EOS, PAD]), max_size=2),
    st.sampled_from([0, 0, 1, 3, 8]),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
@settings(max_examples=300)
def test_reading_is_what_the_naive_way_gives(
    sequence: list[int], stops: list[str], stop_ids: list[Any], silent: set[Any], tokens_min: int, sizes: list[Any]
) -> None:
    reading = IncrementalDetokenizer(TINY, StopStrings(stops), stop_ids, silent, tokens_min)
    text, pieces = read(reading, cut(sequence, sizes))
    assert (text, reading.matched, reading.tokens) == naively(sequence, stops, stop_ids, silent, tokens_min)
    assert sum(piece.tokens for piece in pieces) <= reading.tokens
    assert all(piece.text for piece in pieces)


@given(texts, st.text(st.sampled_from("abEND日é🙂"), min_size=1, max_size=6), texts)
def test_nothing_of_a_stop_string_leaks_at_any_moment(before: str, stop: str, after: str) -> None:
    whole = normalize("NFC", before + stop + after)
    assume(stop in whole)  # a combining accent changes the letter before it
    reading, so_far = IncrementalDetokenizer(TINY, StopStrings([stop])), ""
    for token in ids(whole):
        piece = reading.feed([token])
        so_far += piece.text if piece else ""
        assert whole[: whole.index(stop)].startswith(so_far)
    assert reading.matched == stop
    assert so_far == whole[: whole.index(stop)]


def test_a_stop_across_pieces_is_held_back() -> None:
    reading = IncrementalDetokenizer(TINY, StopStrings(["END"]))
    assert [reading.feed(ids(letter)) for letter in "xEN"] == [Text("x", 1), None, None]
    assert reading.feed(ids("D")) is None
    assert (reading.matched, reading.tokens) == ("END", 4)
    assert reading.finish() is None


def test_what_was_held_back_comes_at_the_end() -> None:
    reading = IncrementalDetokenizer(TINY, StopStrings(["END"]))
    assert reading.feed([*ids("E"), *ids("N")]) is None
    assert reading.finish() == Text("EN", 2)
    assert reading.matched is None


@pytest.mark.parametrize(
    ("stops", "text", "out", "matched"),
    [
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # the one that is complete first
        (["bc", "abc"], "xabcd", "x", "abc"),  # complete together: the longer one
        (["aab"], "aaab", "a", "aab"),  # a false start may hold the true one
        (["a"], "aaa", "", "a"),
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
        (["日本"], "a日日本", "a日", "日本"),
        (["b"], "aaa", "aaa", None),
    ],
)
def test_overlapping_stop_strings_are_distinguished(stops: list[str], text: str, out: str, matched: str | None) -> None:
    for pieces in ([ids(text)], [[token] for token in ids(text)], [ids(letter) for letter in text]):
        reading = IncrementalDetokenizer(TINY, StopStrings(stops))
        assert read(reading, pieces)[0] == out
        assert reading.matched == matched
