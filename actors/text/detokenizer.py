"""Incremental detokenisation: token ids to text as they arrive, in whole characters and without stop strings.

A character may take several tokens, a token may hold parts of two characters, and a stop string may span many tokens.
So the text of a token is certain only later. Bytes of an incomplete character are held back, and then text that may
become a stop string. Text is never taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import Factory, define, field
from tokenizers import Tokenizer

from actors.text.logprobs import PendingLogprobs
from actors.text.stop_strings import StopScanner, StopStrings
from actors.text.whole_tokens import REPLACEMENT_CHARACTER
from protocol.messages.generation import Logprob
from protocol.messages.text import Text

CHARACTER_BYTES_MAX = 4
# The most ids held back as one incomplete character; no character has as many.
HELD_IDS_MAX = 16
# The last ids of a prompt, behind which an answer is decoded: as many as SGLang's own server takes.
PROMPT_IDS = 5


@define(eq=False)
class Decoding:
    """Token ids to text as they come; joined, the tokenizer's text of all ids at once.

    There is one exception: an invalid byte may make a tokenizer decode valid bytes before it as U+FFFD as well, and
    text that was given out stays as it is.
    """

    tokenizer: Tokenizer
    # The last ids that were given out, since the next text depends on them, and behind them the ids held back.
    _ids: list[int] = field(factory=list)
    _given: int = 0  # the number of ids that were given out
    _before: str = ""  # the text of the ids that were given out
    _marker: int | None = None  # a special token with text, while it is the first of the ids

    def step(self, token: int) -> str:
        """Take the next token id; return the characters that are certain by now."""
        if self._ids and self._ids[0] == self._marker and self._is_silent(token):
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        held = len(self._ids) - self._given
        if not text.endswith(REPLACEMENT_CHARACTER):
            if len(text) > len(self._before):
                return self._give(text, len(self._ids))
            if held > HELD_IDS_MAX:
                # Ids without text, such as special tokens, need not be decoded again.
                del self._ids[self._given :]
        elif held > HELD_IDS_MAX:
            # There are too many ids for one character: all but the last few are invalid.
            tail = self._open_tail(text)
            return self._give(text.removesuffix(self._decode(tail)), len(self._ids) - len(tail))
        return ""

    def begin_behind(self, prompt: Sequence[int]) -> None:
        """Decode the next ids as the text behind a prompt: a decoder may drop the space before a text's first word.

        A prompt that ends within a character changes nothing: the rest of that character is no text of its own.
        """
        ids = list(prompt[-PROMPT_IDS:])
        if (text := self._decode(ids)) and not text.endswith(REPLACEMENT_CHARACTER):
            self._ids, self._given, self._before = ids, len(ids), text

    @property
    def holds(self) -> bool:
        """Whether ids are held back."""
        return len(self._ids) != self._given

    def give_whole(self, token: int, text: str) -> None:
        """Take the next token id with its whole text; allowed while nothing is held back."""
        self._ids = [token]
        self._given, self._before = 1, text

    def pass_marker(self, token: int, text: str) -> str:
        """Take the next token id, a special token with this text; return what was held back, and that text."""
        before = self.flush()
        self._marker, self._ids = token, [token]
        self._given, self._before = 1, self._decode(self._ids)
        return f"{before}{text}"

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
        # A marker is the text before the next word, whose space a decoder would drop at the beginning of a text.
        silent = not ids or ids[0] != self._marker
        text: str = self.tokenizer.decode(ids, skip_special_tokens=silent) if ids else ""
        return text

    def _is_silent(self, token: int) -> bool:
        """Return whether a token is a special one, whose text is left out."""
        kept: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return bool(kept) and not self.tokenizer.decode([token], skip_special_tokens=True)


@define(eq=False)
class IncrementalDetokenizer:
    """The detokeniser of one choice.

    `matched` is the stop string or stop token id that ended the choice, if any. Of several stop strings it is the first
    to be complete, and then the longest. `tokens` counts every id up to the end of the stop.
    """

    tokenizer: Tokenizer
    stops: StopStrings | None = None
    stop_ids: Collection[int] = ()
    eos_ids: Collection[int] = ()  # ids without text; the engine decides whether they end the answer
    tokens_min: int = 0  # the number of tokens before which no stop ends the choice
    stop_included: bool = False  # the text ends with the stop string
    choice: int = 0
    pending_logprobs: PendingLogprobs | None = None  # if log probabilities are wanted
    with_ids: bool = False
    whole_tokens: Mapping[int, Text | None] | None = None  # the table of `feed_whole`, which takes nothing without it
    prompt: Sequence[int] = ()  # the ids before the answer, for a decoder that depends on them
    scores_end: bool = False  # an end has a log probability, too
    markers: Mapping[int, str] = Factory(dict)  # special tokens that have a text nevertheless
    tokens: int = 0
    matched: str | int | None = None
    _decoding: Decoding = field(init=False)
    _scanner: StopScanner | None = field(init=False)
    _given_tokens: int = 0  # tokens of the texts that were given out
    _ids: list[int] = field(factory=list)  # ids of text that is held back

    def __attrs_post_init__(self) -> None:
        self._decoding = Decoding(self.tokenizer)
        if self.whole_tokens is None and self.prompt:
            self._decoding.begin_behind(self.prompt)
        self._scanner = None if self.stops is None else StopScanner(self.stops)
        if self.stops is not None or self.stop_ids or self.pending_logprobs is not None or self.with_ids:
            # Each token may mean more than its text.
            self.whole_tokens = None

    def feed_whole(self, token: int) -> Text | None:
        """Take the next id and return its text, if it means nothing else; otherwise return None and change nothing.

        `feed` returns the same text, and the two may alternate: both leave the same state behind.
        """
        if self.whole_tokens is None or self.tokens != self._given_tokens or self._decoding.holds:
            return None
        if (whole := self.whole_tokens[token]) is None:
            return None
        self._decoding.give_whole(token, whole.text)
        self.tokens = self._given_tokens = self.tokens + 1
        return whole if not self.choice else Text(whole.text, 1, self.choice)

    def record_whole(self, ids: Sequence[int]) -> None:
        """Take ids of `whole_tokens` whose texts have been given out, as `feed_whole` does one by one."""
        assert self.whole_tokens is not None
        whole = self.whole_tokens[ids[-1]]
        assert whole is not None
        self._decoding.give_whole(ids[-1], whole.text)
        self.tokens = self._given_tokens = self.tokens + len(ids)

    def feed(self, ids: Sequence[int], logprobs: Sequence[Logprob] = ()) -> Text | None:
        """Take the next ids; return the text that is certain by now, if any. Ids after a stop are ignored."""
        out = ""
        for index, token in enumerate(ids):
            if self.matched is not None:
                break
            self.tokens += 1
            if self.with_ids:
                self._ids.append(token)
            if token in self.stop_ids and self.tokens > self.tokens_min:
                self.matched = token
                out += self._held_back() + self._decoding.flush()
            elif token not in self.eos_ids:
                marker = self.markers.get(token)
                new = self._decoding.step(token) if marker is None else self._decoding.pass_marker(token, marker)
                if self.pending_logprobs is not None and logprobs:
                    self.pending_logprobs.note(token, logprobs[index], len(new))
                out += self._scan(new)
            elif self.scores_end and self.pending_logprobs is not None and logprobs:
                self.pending_logprobs.note(token, logprobs[index], 0)
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
        """Return the text before any possible stop string; sets `matched` if a stop string is complete."""
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
