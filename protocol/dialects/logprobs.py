"""Log probabilities of tokens in OpenAI's shapes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from math import inf

from attrs import Factory, define, field, frozen

from protocol.messages.text import Text, TokenText

LOGPROB_MIN = -9999.0  # OpenAI's value for a nearly impossible token; JSON has no infinity


def logprob_entries(tokens: Iterable[TokenText]) -> list[dict[str, object]]:
    """Return tokens with their log probabilities as chat completions and Responses have them."""
    return [
        {
            **_token(token.text, token.data, token.logprob),
            "top_logprobs": [_token(text, data, logprob) for text, data, logprob in token.top],
        }
        for token in tokens
    ]


def split_text(text: Text, tokens_max: int) -> Iterator[Text]:
    """Yield `text` in pieces of at most `tokens_max` log probabilities, each with the text of its own tokens.

    Joined, the pieces are exactly `text`, even if the bytes of the tokens do not show exactly which part of the text is
    theirs.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offset = 0
    for begin in range(0, len(text.logprobs), tokens_max):
        end = begin + tokens_max
        tokens = text.logprobs[begin:end]
        last = end >= len(text.logprobs)
        stop = None if last else offset + len(decoder.decode(b"".join(token.data for token in tokens)))
        ids = text.ids[begin:] if last else text.ids[begin:end]
        yield Text(text.text[offset:stop], text.tokens - begin if last else len(tokens), text.choice, tokens, ids)
        offset = stop or 0


def _token(text: str, data: bytes, logprob: float | None) -> dict[str, object]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float | None) -> float:
    """Return a log probability as clients get it: `LOGPROB_MIN` if the engine sent no number."""
    return logprob if logprob is not None and LOGPROB_MIN <= logprob < inf else LOGPROB_MIN


@frozen
class Columns:
    """Log probabilities as completions have them; `text_offset` is the place of each token in its choice.

    The first token of a prompt has neither a log probability nor likelier ones.
    """

    tokens: list[str] = Factory(list)
    token_logprobs: list[float | None] = Factory(list)
    top_logprobs: list[dict[str, float] | None] = Factory(list)
    text_offset: list[int] = Factory(list)


@define(eq=False)
class Tabulator:
    """Converts the log probabilities of one choice into columns, piece by piece."""

    _decoder: codecs.IncrementalDecoder = field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _tokens_length: int = 0  # characters of the tokens so far
    _text_length: int = 0  # characters of the text so far

    def add(self, text: Text, into: Columns) -> Columns:
        """Add the next piece of text to columns, and return them."""
        self._text_length += len(text.text)
        for token in text.logprobs:
            into.tokens.append(_name(token.text, token.data))
            into.token_logprobs.append(None if token.logprob is None else finite(token.logprob))
            into.top_logprobs.append(None if token.logprob is None else _likeliest(token))
            into.text_offset.append(min(self._tokens_length, self._text_length))
            self._tokens_length += len(self._decoder.decode(token.data))
        # A detokenizer removes the space before the first word, so that the tokens can be longer than the text.
        self._tokens_length = min(self._tokens_length, self._text_length)
        return into


def _likeliest(token: TokenText) -> dict[str, float]:
    """Return the likeliest tokens by name, and the chosen one at any rank."""
    logprobs: dict[str, float] = {}
    for text, data, logprob in (*token.top, (token.text, token.data, token.logprob)):
        logprobs.setdefault(_name(text, data), finite(logprob))
    return logprobs


def _name(text: str, data: bytes) -> str:
    """Return a token as text, or as its bytes in hexadecimal if they are not whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text
