"""Reading an answer as its tokens come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import define, field
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from protocol.messages import Text


@define(eq=False)
class Reading:
    """One answer's way from token ids to text.

    `matched` is the stop string or stop token id that ended it, once one has; `tokens` counts every id up to and with
    the one that completed the stop.
    """

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    stop_ids: Collection[int] = ()
    silent_ids: Collection[int] = ()  # they end an answer too, but that is for the engine to say
    tokens_min: int = 0  # stops count only after as many
    tokens: int = 0
    matched: str | int | None = None
    _stream: DecodeStream = field(factory=lambda: DecodeStream(skip_special_tokens=True))
    _undecoded: list[int] = field(factory=list)  # ids whose bytes do not make whole characters yet
    _held: str = ""  # text that may turn out to be the start of a stop string
    _told: int = 0  # tokens that the texts given out so far stand for

    def feed(self, ids: Sequence[int]) -> Text | None:
        """Take the next ids and return the text that is certain by now; ids after a stop are ignored."""
        out = ""
        for token in ids:
            if self.matched is not None:
                break
            self.tokens += 1
            if token in self.stop_ids and self.tokens > self.tokens_min:
                self.matched = token
                out += self._flushed()
            elif token not in self.silent_ids:
                out += self._scan(self._decoded(token))
        return self._text(out)

    def finish(self) -> Text | None:
        """Return what was held back, when no more ids will come."""
        return self._text(self._flushed() if self.matched is None else "")

    def _decoded(self, token: int) -> str:
        self._undecoded.append(token)
        text = self._stream.step(self.tokenizer, token)
        if text is None:
            return ""
        self._undecoded.clear()
        return str(text)

    def _flushed(self) -> str:
        # What is left of a character that the answer broke off reads as U+FFFD, as it would in one piece.
        left = self.tokenizer.decode(self._undecoded, skip_special_tokens=True) if self._undecoded else ""
        self._undecoded.clear()
        out = self._scan(left) if self.matched is None else left
        held, self._held = self._held, ""
        return out + held

    def _scan(self, text: str) -> str:
        """Return as much of the text as is surely not part of a stop string, and note a stop that is complete."""
        if not self.stops or self.tokens <= self.tokens_min:
            return text
        text = self._held + text
        self._held = ""
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda pair: pair[0])
            return text[:at]
        keep = self._possible_start(text)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text

    def _possible_start(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the start of a stop string."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        for size in range(longest, 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self.stops):
                return size
        return 0

    def _text(self, text: str) -> Text | None:
        if not text:
            return None
        tokens, self._told = self.tokens - self._told, self.tokens
        return Text(text, tokens)
