"""Log probabilities come with the text in which their token ends: none early, none twice, none of what was cut off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from actors.text.detokenizer import IncrementalDetokenizer
from actors.text.logprobs import PendingLogprobs, token_data
from actors.text.stop_strings import StopStrings
from protocol.messages.generation import Logprob
from tests.actors.text.test_detokenizer import SENTENCEPIECE
from tests.rig.gateway import TINY, ids

DATA = token_data(TINY.tokenizer)
TEXTS = st.text(st.sampled_from("aé日🙂 .END"), min_size=1, max_size=20)


def reading(stops: Sequence[str] = (), **fields: Any) -> IncrementalDetokenizer:
    scores = PendingLogprobs(TINY.tokenizer.id_to_token, DATA)
    return IncrementalDetokenizer(
        TINY.tokenizer, StopStrings(stops) if stops else None, pending_logprobs=scores, **fields
    )


def fed(detokenizer: IncrementalDetokenizer, sequence: Sequence[Any], size: int = 1) -> list[Any]:
    """Feed so many ids at a time, and return every piece."""
    pieces = []
    for start in range(0, len(sequence), size):
        part = sequence[start : start + size]
        pieces.append(detokenizer.feed(part, [Logprob(-float(start + place)) for place in range(len(part))]))
    return [piece for piece in [*pieces, detokenizer.finish()] if piece is not None]


@given(TEXTS, st.integers(1, 5))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str, size: int) -> None:
    pieces = fed(reading(), ids(text), size)
    for count in range(1, len(pieces) + 1):
        data = b"".join(token.data for piece in pieces[:count] for token in piece.logprobs)
        assert data == "".join(piece.text for piece in pieces[:count]).encode()
    assert [token.logprob for piece in pieces for token in piece.logprobs] == [
        -float(place) for place in range(len(ids(text)))
    ]


@given(TEXTS, TEXTS, st.integers(1, 5))
def test_tokens_that_a_stop_string_cuts_off_have_no_log_probabilities(text: str, after: str, size: int) -> None:
    pieces = fed(reading(["END"]), ids(text + "END" + after), size)
    sent = "".join(piece.text for piece in pieces)
    assert "END" not in sent
    tokens = [token for piece in pieces for token in piece.logprobs]
    sizes = list(accumulate(len(token.data) for token in tokens))
    assert b"".join(token.data for token in tokens).startswith(sent.encode())
    assert len(sizes) < 2 or sizes[-2] < len(sent.encode()), "each of them has a part in the text"


def test_the_likeliest_tokens_are_sent_as_text_and_bytes() -> None:
    detokenizer = reading()
    oak, old = ids(" oak")[0], ids(" old")[0]
    piece = detokenizer.feed([oak], [Logprob(-0.5, ((oak, -0.5), (old, -1.5)))])
    assert piece is not None
    [token] = piece.logprobs
    assert (token.text, token.data, token.logprob) == (TINY.tokenizer.decode([oak]), DATA(oak), -0.5)
    assert token.top == ((token.text, DATA(oak), -0.5), (TINY.tokenizer.decode([old]), DATA(old), -1.5))


def test_a_special_token_adds_nothing_but_has_its_name() -> None:
    special = TINY.tokenizer.token_to_id("<|im_start|>")
    detokenizer = reading()
    pieces = fed(detokenizer, [*ids("a"), special, *ids("b")])
    tokens = [token for piece in pieces for token in piece.logprobs]
    assert ("<|im_start|>", b"") in [(token.text, token.data) for token in tokens]
    assert b"".join(token.data for token in tokens) == b"ab"


def test_bytes_are_found_for_a_vocabulary_with_byte_fallback() -> None:
    data = token_data(SENTENCEPIECE)
    assert data(3 + 0xCC) == b"\xcc"
    the = next(
        token for name, token in SENTENCEPIECE.get_vocab().items() if name.startswith("\N{LOWER ONE EIGHTH BLOCK}")
    )
    assert data(the).startswith(b" ")


@given(st.lists(st.integers(0, 511), max_size=30), st.integers(1, 4))
def test_every_id_is_sent_in_order_whatever_became_of_its_text(sequence: list[Any], size: int) -> None:
    detokenizer = IncrementalDetokenizer(TINY.tokenizer, StopStrings(["E"]), eos_ids=[1], with_ids=True)
    pieces = fed(detokenizer, sequence, size)
    sent = [token for piece in pieces for token in piece.ids]
    assert sent == sequence[: detokenizer.tokens]
    if detokenizer.matched is None:
        assert sent == sequence
