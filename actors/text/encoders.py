"""The encoders of a model: from a text to token ids, by `tokenizers` or by `fastokens`.

`fastokens` is many times as quick, but its rules are its own, and it does not know all tokenizers. So it encodes for a
model only after trial texts, encoded by both, have had the same ids. Decoding is `tokenizers`' alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol, cast

from attrs import frozen
from tokenizers import Tokenizer

from actors.text.trials import cut_texts, hard_texts
from protocol.errors import StartFailed
from protocol.token_ids import TokenIds

log = logging.getLogger(__name__)

TOKENIZERS, FASTOKENS = "tokenizers", "fastokens"
TRIAL_TOKENS = 8  # special tokens that stand in trial texts


class NoEncoder(StartFailed):
    """The encoder of a model is not installed."""


class TextEncoder(Protocol):
    """A way to encode texts."""

    def encode(self, text: str, *, special: bool) -> TokenIds:
        """Return the token ids of a text; `special` adds the tokenizer's own tokens around it."""
        ...


@frozen
class ByTokenizers:
    """The encoder of the package `tokenizers`."""

    tokenizer: Tokenizer

    def encode(self, text: str, *, special: bool) -> TokenIds:
        """Return the token ids of a text."""
        # A batch of one releases the GIL, and skips the offsets, which take two thirds of the time.
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return TokenIds.of(encoding.ids)


class FlatTokenizer(Protocol):
    """The part of a tokenizer of `fastokens` that is used."""

    def encode_batch_flat(self, inputs: Sequence[str], *, add_special_tokens: bool) -> tuple[bytes, bytes]:
        """Return the ids of all texts as words of 32 bits, and the offset of each text's own."""
        ...


@frozen
class ByFastokens:
    """The encoder of the package `fastokens`."""

    tokenizer: FlatTokenizer

    def encode(self, text: str, *, special: bool) -> TokenIds:
        """Return the token ids of a text."""
        packed, _ = self.tokenizer.encode_batch_flat([text], add_special_tokens=special)
        return TokenIds(packed)


@frozen
class Around:
    """An encoder of whole texts by one encoder, and of parts, which get no tokens around them, by another."""

    whole: TextEncoder
    parts: TextEncoder

    def encode(self, text: str, *, special: bool) -> TokenIds:
        """Return the token ids of a text."""
        return (self.whole if special else self.parts).encode(text, special=special)


def encoder(name: str, tokenizer: Tokenizer, rendered: Iterable[str]) -> TextEncoder:
    """Return the encoder of a name, or the one of `tokenizers` where the other refuses the tokenizer or differs.

    `rendered` are conversations of the model, read only if they are needed. Raises `NoEncoder` if the package is
    missing.
    """
    usual = ByTokenizers(tokenizer)
    if name == TOKENIZERS:
        return usual
    described = tokenizer.to_str()
    if (quick := _fastokens(described)) is None:
        return usual
    conversations = [*rendered]
    texts = [*conversations, *_hard(_tokens(described, conversations))]
    if (reason := _difference(usual, quick, texts, special=False)) is not None:
        _warn(reason)
        return usual
    # The tokens around a text are a step of their own, so a difference there says nothing about texts without them.
    return quick if _difference(usual, quick, texts, special=True) is None else Around(usual, quick)


def _fastokens(described: str) -> ByFastokens | None:
    try:
        module = import_module(FASTOKENS)
    except ImportError as error:
        raise NoEncoder(
            f'tokenizer = "fastokens" needs the package fastokens: pip install "fastokens>=0.3.5" ({error})'
        ) from error
    try:
        return ByFastokens(cast("FlatTokenizer", module.Tokenizer.from_json_str(described)))
    except Exception as error:  # noqa: BLE001  # it raises several kinds for what it does not know
        _warn(f"it refuses the tokenizer: {error}")
        return None


def _warn(reason: str) -> None:
    log.warning("tokenizers encodes in place of fastokens", extra={"reason": reason})


def _tokens(described: str, rendered: Collection[str]) -> list[str]:
    """Return some added tokens of a tokenizer, first those that conversations have most often."""
    description = cast("Mapping[str, Sequence[Mapping[str, str]]]", json.loads(described))
    contents = [token["content"] for token in description["added_tokens"]]
    return sorted(contents, key=lambda content: -sum(text.count(content) for text in rendered))[:TRIAL_TOKENS]


def _hard(tokens: Sequence[str]) -> Iterator[str]:
    yield from hard_texts(tokens)
    for token in tokens:
        yield from cut_texts(token)


def _difference(usual: TextEncoder, quick: TextEncoder, texts: Collection[str], *, special: bool) -> str | None:
    """Return a sentence about the first text whose ids differ; None if there is none."""
    for number, text in enumerate(texts):
        try:
            same = quick.encode(text, special=special) == usual.encode(text, special=special)
        except Exception as error:  # noqa: BLE001  # such as that of a limit of its own
            return f"it fails for trial text {number}: {error}"
        if not same:
            return f"the ids of trial text {number} differ"
    return None
