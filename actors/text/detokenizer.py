"""Incremental detokenisation: token ids to text as they arrive, in whole characters and without stop strings.

A character may take several tokens, a token may hold parts of two characters, and a stop string may span many tokens.
So what a token adds is certain only later. Bytes that may become a character are held back, and then text that may
become a stop string. Text that was given out is never taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import define, field
from tokenizers import Tokenizer

from actors.text.logprobs import PendingLogprobs
from actors.text.stop_strings import StopScanner, StopStrings
from actors.text.whole_tokens import REPLACEMENT_CHARACTER
from protocol.messages.generation import Logprob
from protocol.messages.text import Text

CHARACTER_BYTES_MAX = 4
HELD_IDS_MAX = 16  # that may become one character; far more than any has
PROMPT_IDS = 5  # the last of a prompt, behind which an answer is decoded: as many as SGLang's own server takes


@define(eq=False)
class Decoding:
    """Token ids to text as they come; joined, the text that the tokenizer returns for all of them at once.

    There is one exception: an invalid byte may make a tokenizer decode valid bytes before it as U+FFFD as well, and
    text that was given out is not changed.
    """

    tokenizer: Tokenizer
    _ids: list[int] = field(factory=list)  # the last that were given out, on which the next depend, and those held back
    _given: int = 0  # how many of them were given out
    _before: str = ""  # the text of those

    def step(self, token: int) -> str:
        """Take the next token id; return the characters that are certain by now."""
        self._ids.append(token)
        text = self._decode(self._ids)
        held = len(self._ids) - self._given
        if not text.endswith(REPLACEMENT_CHARACTER):
            if len(text) > len(self._before):
                return self._give(text, len(self._ids))
            if held > HELD_IDS_MAX:  # without text, such as special tokens
                del self._ids[self._given :]
        elif held > HELD_IDS_MAX:  # too many for one character: all but the last few are invalid
            tail = self._open_tail(text)
            return self._give(text.removesuffix(self._decode(tail)), len(self._ids) - len(tail))
        return ""

    def begin_behind(self, prompt: Sequence[int]) -> None:
        """Decode what comes as the text behind a prompt: a decoder may drop the space before the first word of a text.

        A prompt that ends within a character changes nothing: what completes it is not all of that character.
        """
        ids = list(prompt[-PROMPT_IDS:])
        if (text := self._decode(ids)) and not text.endswith(REPLACEMENT_CHARACTER):
            self._ids, self._given, self._before = ids, len(ids), text

    @property
    def holds(self) -> bool:
        """Whether ids are held back."""
        return len(self._ids) != self._given

    def give_whole(self, token: int, text: str) -> None:
        """Take the next token id, whose text is given out as it is; allowed while nothing is held back."""
        self._ids = [token]
        self._given, self._before = 1, text

    def flush(self) -> str:
        """Return the text that was held back, at the end; an incomplete character is U+FFFD."""
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
        """Return the last ids, as few as possible, that may be the beginning of a character."""
        for size in range(1, CHARACTER_BYTES_MAX):
            if self._decode(self._ids[:-size]) + self._decode(self._ids[-size:]) == text:
                return self._ids[-size:]
        return []

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
        return text


@define(eq=False)
class IncrementalDetokenizer:
    """The detokeniser of one choice.

    `matched` is the stop string or stop token id that ended the choice, if one has: the stop string that is complete
    first, and the longest of several. `tokens` counts every id up to the one that completed the stop.
    """

    tokenizer: Tokenizer
    stops: StopStrings | None = None
    stop_ids: Collection[int] = ()
    eos_ids: Collection[int] = ()  # without text; the engine decides whether they end the answer
    tokens_min: int = 0  # no stop ends the choice before so many tokens
    stop_included: bool = False  # the text ends with the stop string
    choice: int = 0
    pending_logprobs: PendingLogprobs | None = None  # if log probabilities are wanted
    with_ids: bool = False
    whole_tokens: Mapping[int, Text | None] | None = None  # the table of `feed_whole`, which takes nothing without it
    prompt: Sequence[int] = ()  # behind which the answer is decoded, where that makes a difference
    tokens: int = 0
    matched: str | int | None = None
    _decoding: Decoding = field(init=False)
    _scanner: StopScanner | None = field(init=False)
    _given_tokens: int = 0  # tokens of the texts that were given out
    _ids: list[int] = field(factory=list)  # of no text that was given out yet

    def __attrs_post_init__(self) -> None:
        self._decoding = Decoding(self.tokenizer)
        if self.whole_tokens is None and self.prompt:
            self._decoding.begin_behind(self.prompt)
        self._scanner = None if self.stops is None else StopScanner(self.stops)
        if self.stops is not None or self.stop_ids or self.pending_logprobs is not None or self.with_ids:
            self.whole_tokens = None  # each token may mean more than its text

    def feed_whole(self, token: int) -> Text | None:
        """Take the next id if its text is all that it means, and return that; else change nothing and return None.

        `feed` returns the same for it, and the two may alternate: both leave the same state behind.
        """
        if self.whole_tokens is None or self.tokens != self._given_tokens or self._decoding.holds:
            return None
        if (whole := self.whole_tokens[token]) is None:
            return None
        self._decoding.give_whole(token, whole.text)
        self.tokens = self._given_tokens = self.tokens + 1
        return whole if not self.choice else Text(whole.text, 1, self.choice)

    def record_whole(self, ids: Sequence[int]) -> None:
        """Take ids whose texts `whole_tokens` has, and which have been given out, as `feed_whole` does one by one."""
        assert self.whole_tokens is not None
        whole = self.whole_tokens[ids[-1]]
        assert whole is not None
        self._decoding.give_whole(ids[-1], whole.text)
        self.tokens = self._given_tokens = self.tokens + len(ids)

    def feed(self, ids: Sequence[int], logprobs: Sequence[Logprob] = ()) -> Text | None:
        """Take the next ids; return the text that is certain by now, if any. Ids after a stop are ignored."""
        out = ""
        for place, token in enumerate(ids):
            if self.matched is not None:
                break
            self.tokens += 1
            if self.with_ids:
                self._ids.append(token)
            if token in self.stop_ids and self.tokens > self.tokens_min:
                self.matched = token
                out += self._held_back() + self._decoding.flush()
            elif token not in self.eos_ids:
                new = self._decoding.step(token)
                if self.pending_logprobs is not None and logprobs:
                    self.pending_logprobs.note(token, logprobs[place], len(new))
                out += self._scan(new)
        return self._text(out, last=self.matched is not None)

    def finish(self) -> Text | None:
        """Return the text that was held back, at the end."""
        if self.matched is not None:
            return None
        out = self._scan(self._decoding.flush())
        if self.matched is None:
            out += self._held_back()
        return self._text(out, last=True)

    def _held_back(self) -> str:
        return "" if self._scanner is None else self._scanner.flush()

    def _scan(self, text: str) -> str:
        """Return the text that is certainly not part of a stop string; sets `matched` if a stop is complete."""
        if not text or self._scanner is None or self.tokens <= self.tokens_min:
            return text
        text, matched = self._scanner.scan(text)
        if matched is not None:
            self.matched = matched
            return text + matched if self.stop_included else text
        return text

    def _text(self, text: str, *, last: bool) -> Text | None:
        if not text and not (last and (self._ids or self.pending_logprobs is not None)):
            return None
        tokens, self._given_tokens = self.tokens - self._given_tokens, self.tokens
        if self.pending_logprobs is None and not self.with_ids:
            return Text(text, tokens, self.choice)
        logprobs = () if self.pending_logprobs is None else self.pending_logprobs.take(len(text), last=last)
        ids, self._ids = tuple(self._ids), []
        return Text(text, tokens, self.choice, logprobs, ids) if text or logprobs or ids else None
