"""The table of whole tokens gives the text that decoding gives, for every token and behind any others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from actors.text.detokenizer import HELD_IDS_MAX, IncrementalDetokenizer
from actors.text.stop_strings import StopStrings
from actors.text.whole_tokens import REPLACEMENT_CHARACTER, WholeTokens, whole_tokens
from protocol.messages.text import Text
from tests.actors.text.test_detokenizer import EOS, TINY, answers, ids

LETTERS = [
    "a",
    "\u0120b",
    "\u0120",
    "\u010a",
    "h\u00c3\u00a9",
    "\u00f0\u0141",
    "\u013b\u0124",
    "\u00ef\u00bf\u00bd",
    "\u00ff",
]
BYTE = LETTERS.index("\u00ff")  # that no character has
HAND_MADE = Tokenizer(models.BPE({letter: token for token, letter in enumerate(LETTERS)}, []))
HAND_MADE.decoder = decoders.ByteLevel()
HAND_MADE.add_tokens(["plain"])
HAND_MADE.add_special_tokens(["<special>"])


def table(tokenizer: Tokenizer = TINY, eos: Sequence[int] = (EOS,)) -> WholeTokens:
    found = whole_tokens(tokenizer, json.loads(tokenizer.to_str()), eos)
    assert found is not None
    return found


def piece_by_piece(detokenizer: IncrementalDetokenizer, tokens: Sequence[int], *, whole: bool) -> Iterator[Text]:
    """Yield what comes of each token; with `whole` by the table wherever it takes one."""
    for token in tokens:
        text = detokenizer.feed_whole(token) if whole else None
        if (text := text or detokenizer.feed([token])) is not None:
            yield text
    if (text := detokenizer.finish()) is not None:
        yield text


@pytest.mark.parametrize("tokenizer", [TINY, HAND_MADE], ids=["tiny", "hand-made"])
def test_every_token_of_a_table_has_the_text_that_it_decodes_to(tokenizer: Tokenizer) -> None:
    whole, added = table(tokenizer, ()), {each["id"] for each in json.loads(tokenizer.to_str())["added_tokens"]}
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=True)
        doubtful = token in added or not text or REPLACEMENT_CHARACTER in text
        assert whole[token] == (None if doubtful else Text(text, 1))
    assert whole[10**6] is None


SIZE_OF_HAND_MADE = len(LETTERS) + 2


@settings(max_examples=500)
@example(tokens=[EOS, *ids("oak")], choice=0, ends=True)  # the end has no text, and counts with the next that has
@given(tokens=answers, choice=st.integers(0, 1), ends=st.booleans())
def test_pieces_by_the_table_are_those_without_it(tokens: list[int], choice: int, ends: bool) -> None:
    eos = frozenset({EOS}) if ends else frozenset()

    def detokenizer() -> IncrementalDetokenizer:
        return IncrementalDetokenizer(TINY, eos_ids=eos, choice=choice, whole_tokens=table())

    with_table = list(piece_by_piece(detokenizer(), tokens, whole=True))
    assert with_table == list(piece_by_piece(detokenizer(), tokens, whole=False))


@settings(max_examples=500)
@example(tokens=[*[BYTE] * (HELD_IDS_MAX + 1), 0], ways=[True])  # the last byte is held back, all others were given out
@given(
    tokens=st.lists(st.integers(0, SIZE_OF_HAND_MADE - 1), max_size=40),
    ways=st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_the_table_may_be_left_and_taken_up_at_any_token(tokens: list[int], ways: list[bool]) -> None:
    whole = table(HAND_MADE, ())
    mixed = IncrementalDetokenizer(HAND_MADE, whole_tokens=whole)
    pieces = []
    for place, token in enumerate(tokens):
        text = mixed.feed_whole(token) if ways[place % len(ways)] else None
        pieces.append(text or mixed.feed([token]))
    pieces.append(mixed.finish())
    assert [text for text in pieces if text] == list(
        piece_by_piece(IncrementalDetokenizer(HAND_MADE), tokens, whole=False)
    )
    assert mixed.tokens == len(tokens)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=repr,
)
def test_no_other_decoder_has_a_table(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({"oak": 0}, "oak"))
    if decoder is not None:
        tokenizer.decoder = decoder
    assert whole_tokens(tokenizer, json.loads(tokenizer.to_str()), ()) is None
    assert IncrementalDetokenizer(tokenizer).feed_whole(0) is None


@pytest.mark.parametrize(
    "wanted",
    [{"stops": StopStrings(("END",))}, {"stop_ids": {7}}, {"with_ids": True}],
    ids=["a stop string", "a stop token", "token ids"],
)
def test_what_needs_more_than_text_does_without_the_table(wanted: dict[str, object]) -> None:
    detokenizer = IncrementalDetokenizer(TINY, whole_tokens=table(), **wanted)  # type: ignore[arg-type]
    assert detokenizer.feed_whole(ids("a")[0]) is None


def test_a_table_keeps_a_limited_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.text.whole_tokens.TOKENS_MAX", 10)
    whole = table()
    assert all(whole[token] == table()[token] for token in range(50))
    assert len(whole) <= 10
