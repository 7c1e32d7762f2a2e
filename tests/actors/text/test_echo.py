"""An echo is its prompt's text exactly, and its log probabilities have the place of each token in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.simulated.scores import PromptScorer
from actors.text.echo import ENTRIES_A_PIECE, TOKEN_ENTRIES, Echo
from actors.text.model import TextModel
from protocol.dialects.logprobs import Columns, Tabulator
from protocol.errors import InternalError
from protocol.messages.generation import PromptScores
from protocol.messages.text import Text
from protocol.tensors import Dtype, Tensor
from tests.actors.test_processor import CONTENTS
from tests.actors.text.test_detokenizer import SENTENCEPIECE
from tests.rig.gateway import TINY, ids, load_with_fixed_clock

SPACED: TextModel = load_with_fixed_clock(CONTENTS | {"tokenizer.json": SENTENCEPIECE.to_str().encode()})


def scores(tokens: Sequence[int], likeliest: int) -> PromptScores:
    scorer = PromptScorer(512, likeliest)
    scorer.add(tokens)
    return scorer.scores()


def echoed(model: TextModel, tokens: Sequence[int], likeliest: int = 2) -> list[Text]:
    return list(Echo(model, tokens, model.decode(tokens), 3, scores(tokens, likeliest)).pieces())


def table(pieces: list[Text]) -> Columns:
    tabulator, columns = Tabulator(), Columns()
    for piece in pieces:
        tabulator.add(piece, columns)
    return columns


@settings(deadline=None)
@given(st.lists(st.integers(0, 511), min_size=1, max_size=300), st.sampled_from([0, 1, 20]))
def test_pieces_are_the_text_and_the_table_has_every_token(tokens: list[int], likeliest: int) -> None:
    pieces = echoed(TINY, tokens, likeliest)
    assert "".join(piece.text for piece in pieces) == TINY.decode(tokens)
    assert all(len(piece.logprobs) * (TOKEN_ENTRIES + likeliest) <= ENTRIES_A_PIECE for piece in pieces)
    assert {(piece.choice, piece.tokens) for piece in pieces} == {(3, 0)}
    columns = table(pieces)
    assert len(columns.tokens) == len(columns.text_offset) == len(tokens)
    assert (columns.token_logprobs[0], columns.top_logprobs[0]) == (None, None)
    expected = scores(tokens, likeliest).logprobs.data.cast("B").cast("f").tolist()
    assert columns.token_logprobs[1:] == expected
    assert columns.text_offset == sorted(columns.text_offset)


def test_each_token_stands_at_its_offset() -> None:
    text = "<|im_start|>user\nThe oak 日本 🙂 is old<|im_end|>"
    columns = table(echoed(TINY, ids(text)))
    places = [*columns.text_offset, len(text)]
    for token, begin, end in zip(columns.tokens, places, places[1:], strict=False):
        if not token.startswith("bytes:"):
            assert text[begin:end] == token


def test_the_space_that_a_decoder_removes_shifts_no_offset() -> None:
    tokens = SPACED.encode_text("Hello you there")
    text = SPACED.decode(tokens)
    columns = table(echoed(SPACED, tokens))
    assert not text.startswith(" ")
    for token, begin in zip(columns.tokens[1:], columns.text_offset[1:], strict=True):
        assert text.startswith(token, begin)


def test_a_token_among_the_likeliest_has_their_number() -> None:
    rows = PromptScores(
        Tensor(Dtype.FLOAT32, (1,), memoryview(array("f", [-0.5000001])).cast("B")),
        Tensor(Dtype.INT32, (1, 2), memoryview(array("i", [8, 7])).cast("B")),
        Tensor(Dtype.FLOAT32, (1, 2), memoryview(array("f", [-0.5, -inf])).cast("B")),
    )
    (piece,) = Echo(TINY, [7, 8], TINY.decode([7, 8]), 0, rows).pieces()
    first, second = piece.logprobs
    assert (first.logprob, first.top) == (None, ())
    assert (second.logprob, second.top[0][2]) == (-0.5, -0.5)
    assert table([piece]).top_logprobs[1] == {TINY.decode([8]): -0.5, TINY.decode([7]): -9999.0}


def test_ids_that_cannot_be_fail_the_request() -> None:
    rows = PromptScores(
        Tensor(Dtype.FLOAT32, (1,), memoryview(array("f", [-0.5])).cast("B")),
        Tensor(Dtype.INT32, (1, 1), memoryview(array("i", [-8])).cast("B")),
        Tensor(Dtype.FLOAT32, (1, 1), memoryview(array("f", [-0.5])).cast("B")),
    )
    with pytest.raises(InternalError):
        list(Echo(TINY, [7, 8], TINY.decode([7, 8]), 0, rows).pieces())
