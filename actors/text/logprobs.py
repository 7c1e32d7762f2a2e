"""Log probabilities as clients get them: each token as text and bytes, with the text that it ends in.

Where text is held back, the log probabilities of its tokens are held back too: a client could otherwise read the stop
string from them. A token belongs to the text with its last character.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache

from attrs import define, field, frozen
from tokenizers import Tokenizer

from protocol.messages.generation import Logprob
from protocol.messages.text import TokenText

TokenData = Callable[[int], bytes]
"""The bytes that a token adds to a text, possibly a part of a character; none for a special token."""

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


@frozen
class _Pending:
    """A token with text that is held back, and its range of characters in the choice."""

    begin: int
    end: int
    text: TokenText


@define(eq=False)
class PendingLogprobs:
    """The log probabilities of one choice, kept until the text of their tokens is given out."""

    name: Callable[[int], str | None]
    data: TokenData
    _pending: deque[_Pending] = field(factory=deque)
    _decoded: int = 0  # characters
    _given: int = 0  # characters

    def note(self, token: int, logprob: Logprob, characters: int) -> None:
        """Add the next token, and the number of characters that it completed."""
        begin, self._decoded = self._decoded, self._decoded + characters
        data = self.data(token)
        # A token that completes no character is part of the next one.
        end = self._decoded if characters or not data else begin + 1
        top = tuple((self._text(other), self.data(other), value) for other, value in logprob.top)
        self._pending.append(_Pending(begin, end, TokenText(self._text(token), data, logprob.logprob, top)))

    def take(self, characters: int, *, last: bool) -> tuple[TokenText, ...]:
        """Return the tokens that end within the next `characters` of text.

        With `last`, also the token that a stop string cut in two, but no token behind the cut.
        """
        self._given += characters
        out: list[TokenText] = []
        while self._pending and self._pending[0].end <= self._given:
            out.append(self._pending.popleft().text)
        if last:
            out += [pending.text for pending in self._pending if pending.begin < self._given]
            self._pending.clear()
        return tuple(out)

    def _text(self, token: int) -> str:
        return self.data(token).decode(errors="replace") or self.name(token) or ""


def token_data(tokenizer: Tokenizer, description: Mapping[str, object] | None = None) -> TokenData:
    """Return a function from a token id to its bytes, for the usual kinds of tokenizers.

    `description` is the tokenizer's own (`tokenizer.json`); for a large vocabulary it takes long to make.
    """
    description = json.loads(tokenizer.to_str()) if description is None else description
    tokens, decoder = description.get("added_tokens"), description.get("decoder")
    added: dict[int, bytes] = {
        entry["id"]: b"" if entry.get("special") else entry["content"].encode()
        for entry in (tokens if isinstance(tokens, list) else ())
    }
    kinds = _kinds(decoder if isinstance(decoder, dict) else None)
    bytes_of_name: Callable[[str], bytes] | None = None
    if "ByteLevel" in kinds:
        bytes_of_name = _byte_level(byte_alphabet())
    elif "ByteFallback" in kinds:
        bytes_of_name = _byte_fallback

    @lru_cache(maxsize=16_384)
    def data(token: int) -> bytes:
        if token in added:
            return added[token]
        name: str | None = tokenizer.id_to_token(token)
        if name is None:
            return b""
        if bytes_of_name is not None:
            return bytes_of_name(name)
        text: str = tokenizer.decode([token])
        return text.encode()

    return data


def _byte_level(byte_of: dict[str, bytes]) -> Callable[[str], bytes]:
    return lambda name: b"".join([byte_of.get(letter) or letter.encode() for letter in name])


def _byte_fallback(name: str) -> bytes:
    if match := _FALLBACK.fullmatch(name):
        return bytes([int(match[1], 16)])
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _kinds(decoder: dict[str, object] | None) -> set[str]:
    if decoder is None:
        return set()
    inner = decoder.get("decoders")
    parts = inner if isinstance(inner, list) else []
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in parts))


def byte_alphabet() -> dict[str, bytes]:
    """Return the byte of each letter of a byte-level vocabulary (the inverse of GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return letters | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}
