"""An echoed prompt: its text at the beginning of a choice, with the log probabilities of its tokens if they are wanted.

Unlike an answer, a prompt shows its special tokens. It is given out in pieces of `ENTRIES_A_PIECE`, about a millisecond
of work each, here and at the gateway: the length of a prompt and the number of likeliest tokens are a client's choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from attrs import define, field

from actors.text.model import TextModel
from protocol.errors import InternalError
from protocol.messages.generation import PromptScores
from protocol.messages.text import Text, TokenText

ENTRIES_A_PIECE = 256
TOKEN_ENTRIES = 4  # a token costs as much as so many likeliest ones


@define(eq=False)
class Echo:
    """The echo of one prompt in one choice."""

    model: TextModel
    tokens: Sequence[int]
    text: str
    choice: int
    scores: PromptScores | None = None
    _decoder: codecs.IncrementalDecoder = field(factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    _end: int = 0  # characters of the tokens so far

    def pieces(self) -> Iterator[Text]:
        """Yield the prompt in pieces; joined, their texts are exactly its text."""
        if self.scores is None:
            yield Text(self.text, 0, self.choice)
            return
        tensors = self.scores
        likeliest, length = tensors.top_ids.shape[1], len(self.tokens)
        logprobs = tensors.logprobs.data.cast("B").cast("f")
        top_ids, top_logprobs = tensors.top_ids.data.cast("B").cast("i"), tensors.top_logprobs.data.cast("B").cast("f")
        size = max(1, ENTRIES_A_PIECE // (TOKEN_ENTRIES + likeliest))
        for begin in range(0, length, size):
            start, end, entries = self._end, min(begin + size, length), []
            for index in range(begin, end):
                token, row = self.tokens[index], slice(max(0, index - 1) * likeliest, index * likeliest)
                ids, values = top_ids[row].tolist(), top_logprobs[row].tolist()
                # Engines round the two differently, and a client compares them to see whether a token is the likeliest.
                own = logprobs[index - 1] if index else None  # the first token has no row
                logprob = values[ids.index(token)] if token in ids else own
                entries.append(self._entry(token, logprob, self._likeliest(ids, values)))
            text = self.text[start : None if end == length else self._end]
            yield Text(text, 0, self.choice, tuple(entries))

    def _entry(self, token: int, logprob: float | None, top: tuple[tuple[str, bytes, float], ...]) -> TokenText:
        text = self._text(token)
        data = self.model.data(token) or text.encode()
        added = self._decoder.decode(data)
        begins = self.text.startswith
        # A decoder may remove the space before the first word.
        if added[:1] == " " and not begins(added, self._end) and begins(added[1:], self._end):
            data, added = data[1:], added[1:]
        self._end = min(self._end + len(added), len(self.text))
        return TokenText(text, data, logprob, top)

    def _likeliest(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[str, bytes, float], ...]:
        if ids and min(ids) < 0:  # another node may have sent any
            raise InternalError("the log probabilities of a prompt name tokens that there are not")
        data = self.model.data
        return tuple([(self._text(token), data(token), value) for token, value in zip(ids, logprobs, strict=True)])

    def _text(self, token: int) -> str:
        return self.model.data(token).decode(errors="replace") or self.model.tokenizer.id_to_token(token) or ""
