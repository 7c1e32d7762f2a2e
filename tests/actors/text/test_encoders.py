"""A quicker encoder encodes only where it agrees with the tokenizer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from attrs import frozen

from actors.text import encoders
from actors.text.encoders import FASTOKENS, Around, ByFastokens, ByTokenizers, NoEncoder
from actors.text.model import TextModel
from protocol.token_ids import TokenIds
from tests.rig.gateway import CONTENTS_OF_TINY, TINY, load_with_fixed_clock

USUAL = ByTokenizers(TINY.tokenizer)
Change = Callable[[str, bool, TokenIds], TokenIds]


@frozen
class Flat:
    """A tokenizer with another way to encode some texts."""

    change: Change

    def encode_batch_flat(self, inputs: Sequence[str], *, add_special_tokens: bool) -> tuple[bytes, bytes]:
        [text] = inputs
        return self.change(text, add_special_tokens, USUAL.encode(text, special=add_special_tokens)).packed, b""


def loaded(monkeypatch: pytest.MonkeyPatch, change: Change) -> TextModel:
    tokenizers = SimpleNamespace(from_json_str=lambda _: Flat(change))
    monkeypatch.setitem(sys.modules, FASTOKENS, SimpleNamespace(Tokenizer=tokenizers))
    return load_with_fixed_clock(CONTENTS_OF_TINY, encodes=FASTOKENS)


def reasons(caplog: pytest.LogCaptureFixture) -> list[object]:
    return [vars(record)["reason"] for record in caplog.records if record.name == encoders.__name__]


def same(_text: str, _special: bool, ids: TokenIds) -> TokenIds:
    return ids


def test_tokenizers_encodes_where_nothing_is_said() -> None:
    assert isinstance(TINY.encoder, ByTokenizers)


def test_an_encoder_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(monkeypatch, same)
    assert isinstance(model.encoder, ByFastokens)
    assert model.encode_text("An oak.") == TINY.encode_text("An oak.")
    assert model.boundary == TINY.boundary
    assert not reasons(caplog)


@pytest.mark.parametrize("word", ["", "\u212b", "<|im_end|><|im_end|>", "lazy dog"])
def test_an_encoder_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, word: str
) -> None:
    """A difference in one kind of text is enough: everywhere, at a normalised letter, at tokens, in a conversation."""

    def change(text: str, _special: bool, ids: TokenIds) -> TokenIds:
        return TokenIds.joined([ids, TokenIds.of([1])]) if word in text else ids

    assert isinstance(loaded(monkeypatch, change).encoder, ByTokenizers)
    [reason] = reasons(caplog)
    assert "differ" in str(reason)


def test_an_encoder_that_fails_for_a_text_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def change(text: str, _special: bool, ids: TokenIds) -> TokenIds:
        if "a" * 300 in text:
            raise RuntimeError("too long a word")
        return ids

    assert isinstance(loaded(monkeypatch, change).encoder, ByTokenizers)
    [reason] = reasons(caplog)
    assert "too long a word" in str(reason)


def test_whole_texts_are_encoded_by_tokenizers_where_the_tokens_around_them_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(_text: str, special: bool, ids: TokenIds) -> TokenIds:
        return TokenIds.joined([TokenIds.of([1]), ids]) if special else ids

    model = loaded(monkeypatch, change)
    assert isinstance(model.encoder, Around)
    assert isinstance(model.encoder.parts, ByFastokens)
    assert model.encode_text("An oak.") == TINY.encode_text("An oak.")


def test_a_tokenizer_that_is_refused_is_encoded_by_tokenizers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: str) -> None:
        raise ValueError("no Metaspace")

    monkeypatch.setitem(sys.modules, FASTOKENS, SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=refuse)))
    with caplog.at_level(logging.WARNING):
        assert isinstance(load_with_fixed_clock(CONTENTS_OF_TINY, encodes=FASTOKENS).encoder, ByTokenizers)
    assert reasons(caplog) == ["it refuses the tokenizer: no Metaspace"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FASTOKENS, None)
    with pytest.raises(NoEncoder, match='pip install "fastokens>='):
        load_with_fixed_clock(CONTENTS_OF_TINY, encodes=FASTOKENS)


def test_the_package_encodes_as_tokenizers_does(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip(FASTOKENS)
    model = load_with_fixed_clock(CONTENTS_OF_TINY, encodes=FASTOKENS)
    assert not reasons(caplog)
    for text in ("", "An oak. " * 999, "<|im_start|>user\nwörld 日本 🙂<|im_end|>\n"):
        assert model.encode_text(text) == TINY.encode_text(text)
        assert model.encode_rendered(text) == TINY.encode_rendered(text)
