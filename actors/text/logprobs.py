"""Log probabilities as clients read them: each token as text and bytes, told with the text that it ends in."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache

from attrs import define, field, frozen
from tokenizers import Tokenizer

from protocol.messages import Logprob
from protocol.text_messages import TokenText

TokenData = Callable[[int], bytes]
"""What a token adds to a text: its bytes, which may be a part of a character; none for a special token."""

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


@frozen
class _Pending:
    """A token whose text is not all told yet: the characters of the choice that it is part of."""

    begin: int
    end: int
    told: TokenText


@define(eq=False)
class PendingLogprobs:
    """The log probabilities of one choice, kept until the text of their tokens is told."""

    name: Callable[[int], str | None]
    data: TokenData
    _pending: deque[_Pending] = field(factory=deque)
    _decoded: int = 0  # characters
    _told: int = 0  # characters

    def note(self, token: int, logprob: Logprob, characters: int) -> None:
        """Note the next token, which has completed so many more characters of the text."""
        begin, self._decoded = self._decoded, self._decoded + characters
        data = self.data(token)
        # What completes no character is part of the next one.
        end = self._decoded if characters or not data else begin + 1
        top = tuple((self._text(each), self.data(each), value) for each, value in logprob.top)
        self._pending.append(_Pending(begin, end, TokenText(self._text(token), data, logprob.logprob, top)))

    def take(self, characters: int, *, last: bool) -> tuple[TokenText, ...]:
        """Return the tokens that end within the next so many characters of text.

        If they are the last, also the one that a stop string cut, and none of those that were cut off whole.
        """
        self._told += characters
        out: list[TokenText] = []
        while self._pending and self._pending[0].end <= self._told:
            out.append(self._pending.popleft().told)
        if last:
            out += [each.told for each in self._pending if each.begin < self._told]
            self._pending.clear()
        return tuple(out)

    def _text(self, token: int) -> str:
        return self.data(token).decode(errors="replace") or self.name(token) or ""


def token_data(tokenizer: Tokenizer, described: Mapping[str, object] | None = None) -> TokenData:
    """Return how to find the bytes of a tokenizer's tokens, whichever of the usual kinds it is.

    `described` is its own description, which takes long to make of a large vocabulary.
    """
    described = json.loads(tokenizer.to_str()) if described is None else described
    tokens, decoder = described.get("added_tokens"), described.get("decoder")
    added: dict[int, bytes] = {
        each["id"]: b"" if each.get("special") else each["content"].encode()
        for each in (tokens if isinstance(tokens, list) else ())
    }
    kinds = _kinds(decoder if isinstance(decoder, dict) else None)
    spelled: Callable[[str], bytes] | None = None
    if "ByteLevel" in kinds:
        spelled = _byte_level(byte_alphabet())
    elif "ByteFallback" in kinds:
        spelled = _byte_fallback

    @lru_cache(maxsize=16_384)
    def data(token: int) -> bytes:
        if token in added:
            return added[token]
        name: str | None = tokenizer.id_to_token(token)
        if name is None:
            return b""
        if spelled is not None:
            return spelled(name)
        text: str = tokenizer.decode([token])
        return text.encode()

    return data


def _byte_level(byte_of: dict[str, bytes]) -> Callable[[str], bytes]:
    return lambda name: b"".join([byte_of.get(letter) or letter.encode() for letter in name])


def _byte_fallback(name: str) -> bytes:
    if found := _FALLBACK.fullmatch(name):
        return bytes([int(found[1], 16)])
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _kinds(decoder: dict[str, object] | None) -> set[str]:
    if decoder is None:
        return set()
    inner = decoder.get("decoders")
    parts = inner if isinstance(inner, list) else []
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in parts))


def byte_alphabet() -> dict[str, bytes]:
    """Return what each letter of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`, the other way)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}
