"""Reading an answer as its tokens come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import define, field
from tokenizers import Tokenizer

from actors.text.logprobs import PendingLogprobs
from actors.text.stop_strings import StopScanner, StopStrings
from protocol.messages import Logprob
from protocol.text_messages import Text

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
CHARACTER_BYTES_MAX = 4
HELD_IDS_MAX = 16  # that may yet become a character; far more than any has


@define(eq=False)
class Decoding:
    """Token ids to text as they come, which is the text that they have in one piece.

    Where a tokenizer reads one broken byte as a reason to call the sound ones before it broken too, what was given out
    stays as it was.
    """

    tokenizer: Tokenizer
    _ids: list[int] = field(factory=list)  # the last that were given out, as what follows depends on them, and the rest
    _given: int = 0  # how many of them were given out
    _before: str = ""  # the text of those

    def step(self, token: int) -> str:
        """Take the next id and return the whole characters that have become certain."""
        self._ids.append(token)
        text = self._decode(self._ids)
        held = len(self._ids) - self._given
        if not text.endswith(REPLACEMENT_CHARACTER):
            if len(text) > len(self._before):
                return self._give(text, len(self._ids))
            if held > HELD_IDS_MAX:  # they say nothing, special tokens for example
                del self._ids[self._given :]
        elif held > HELD_IDS_MAX:  # too many to be one character: all but the last few are broken for good
            tail = self._open_tail(text)
            return self._give(text.removesuffix(self._decode(tail)), len(self._ids) - len(tail))
        return ""

    def flush(self) -> str:
        """Return what is left when nothing follows; a character that was broken off reads as U+FFFD."""
        text = self._decode(self._ids)[len(self._before) :]
        self._ids.clear()
        self._given, self._before = 0, ""
        return text

    def _give(self, text: str, given: int) -> str:
        new = text[len(self._before) :]
        del self._ids[: self._given]
        self._given = given - self._given
        self._before = self._decode(self._ids[: self._given])
        return new

    def _open_tail(self, text: str) -> list[int]:
        """Return the last ids, as few as possible, that are broken by themselves and may begin a character."""
        for size in range(1, CHARACTER_BYTES_MAX):
            if self._decode(self._ids[:-size]) + self._decode(self._ids[-size:]) == text:
                return self._ids[-size:]
        return []

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
        return text


@define(eq=False)
class IncrementalDetokenizer:
    """One choice's way from token ids to text.

    `matched` is the stop string or stop token id that ended it, once one has: the stop string that is complete first,
    the longest of those if there are several. `tokens` counts every id up to and with the one that completed the stop.
    """

    tokenizer: Tokenizer
    stops: StopStrings | None = None
    stop_ids: Collection[int] = ()
    silent_ids: Collection[int] = ()  # they end an answer too, but that is for the engine to say
    tokens_min: int = 0  # stops count only after as many
    stop_included: bool = False  # the text ends with the stop string
    choice: int = 0
    scores: PendingLogprobs | None = None  # where log probabilities are wanted
    tells_ids: bool = False
    tokens: int = 0
    matched: str | int | None = None
    _decoding: Decoding = field(init=False)
    _scanner: StopScanner | None = field(init=False)
    _told: int = 0  # tokens that the texts given out so far stand for
    _ids: list[int] = field(factory=list)  # that no text has told yet

    def __attrs_post_init__(self) -> None:
        self._decoding = Decoding(self.tokenizer)
        self._scanner = None if self.stops is None else StopScanner(self.stops)

    def feed(self, ids: Sequence[int], logprobs: Sequence[Logprob] = ()) -> Text | None:
        """Take the next ids and return the text that is certain by now; ids after a stop are ignored."""
        out = ""
        for place, token in enumerate(ids):
            if self.matched is not None:
                break
            self.tokens += 1
            if self.tells_ids:
                self._ids.append(token)
            if token in self.stop_ids and self.tokens > self.tokens_min:
                self.matched = token
                out += self._held_back() + self._decoding.flush()
            elif token not in self.silent_ids:
                new = self._decoding.step(token)
                if self.scores is not None and logprobs:
                    self.scores.note(token, logprobs[place], len(new))
                out += self._scan(new)
        return self._text(out, last=self.matched is not None)

    def finish(self) -> Text | None:
        """Return what was held back, when no more ids will come."""
        if self.matched is not None:
            return None
        out = self._scan(self._decoding.flush())
        if self.matched is None:
            out += self._held_back()
        return self._text(out, last=True)

    def _held_back(self) -> str:
        return "" if self._scanner is None else self._scanner.flush()

    def _scan(self, text: str) -> str:
        """Return as much of the text as is surely not part of a stop string, and note a stop that is complete."""
        if not text or self._scanner is None or self.tokens <= self.tokens_min:
            return text
        text, matched = self._scanner.scan(text)
        if matched is not None:
            self.matched = matched
            return text + matched if self.stop_included else text
        return text

    def _text(self, text: str, *, last: bool) -> Text | None:
        if not text and not (last and (self._ids or self.scores is not None)):
            return None
        tokens, self._told = self.tokens - self._told, self.tokens
        if self.scores is None and not self.tells_ids:
            return Text(text, tokens, self.choice)
        scores = () if self.scores is None else self.scores.take(len(text), last=last)
        ids, self._ids = tuple(self._ids), []
        return Text(text, tokens, self.choice, scores, ids) if text or scores or ids else None
