"""Log probabilities of tokens in OpenAI's shapes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from attrs import Factory, define, field, frozen

from protocol.text_messages import Text, TokenText

LEAST = -9999.0  # what OpenAI says of a token that is as good as impossible; JSON has no infinity


def logprob_entries(tokens: Iterable[TokenText]) -> list[dict[str, object]]:
    """Return tokens as chat completions and Responses list them."""
    return [
        {
            **_token(token.text, token.data, token.logprob),
            "top_logprobs": [_token(text, data, logprob) for text, data, logprob in token.top],
        }
        for token in tokens
    ]


def split_text(text: Text, tokens_max: int) -> Iterator[Text]:
    """Yield `text` in pieces of at most so many log probabilities, each with what its own tokens add to the text.

    Together the pieces are the whole of it, where a token's bytes do not say exactly which part of the text is its own.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at = 0
    for begin in range(0, len(text.logprobs), tokens_max):
        end = begin + tokens_max
        tokens = text.logprobs[begin:end]
        last = end >= len(text.logprobs)
        to = None if last else at + len(decoder.decode(b"".join(token.data for token in tokens)))
        ids = text.ids[begin:] if last else text.ids[begin:end]
        yield Text(text.text[at:to], text.tokens - begin if last else len(tokens), text.choice, tokens, ids)
        at = to or 0


def _token(text: str, data: bytes, logprob: float) -> dict[str, object]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)  # in this order, as it is for not-a-number, too


@frozen
class Columns:
    """Log probabilities as completions have them; `text_offset` is where in its choice's text each token begins."""

    tokens: list[str] = Factory(list)
    token_logprobs: list[float] = Factory(list)
    top_logprobs: list[dict[str, float]] = Factory(list)
    text_offset: list[int] = Factory(list)


@define(eq=False)
class Tabulator:
    """Puts the log probabilities of one choice into columns, piece by piece."""

    _decoder: codecs.IncrementalDecoder = field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _at: int = 0  # characters that the tokens so far come to
    _told: int = 0  # characters of the text that was told

    def add(self, text: Text, into: Columns) -> Columns:
        """Add the next piece of text to columns, and return them."""
        self._told += len(text.text)
        for token in text.logprobs:
            into.tokens.append(_name(token.text, token.data))
            into.token_logprobs.append(_finite(token.logprob))
            into.top_logprobs.append(_likeliest(token))
            into.text_offset.append(min(self._at, self._told))
            self._at += len(self._decoder.decode(token.data))
        # Decoders of text take away the space before its first word, so the tokens can come to more than was told.
        self._at = min(self._at, self._told)
        return into


def _likeliest(token: TokenText) -> dict[str, float]:
    """Return the likeliest tokens by name, and the chosen one wherever it stands."""
    out: dict[str, float] = {}
    for text, data, logprob in (*token.top, (token.text, token.data, token.logprob)):
        out.setdefault(_name(text, data), _finite(logprob))
    return out


def _name(text: str, data: bytes) -> str:
    """Return a token as text, or as its bytes in hexadecimal where they are a part of a character."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text
