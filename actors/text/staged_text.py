"""The text of one choice, from its detokeniser through its stage, in small replies.

A reply has the log probabilities, the ids and the number of the tokens that end in its text. While a stage holds text
back, the tokens of that text wait. They belong to the piece with their last character; the tokens of a marker belong to
the next piece, or to an empty one at the end. A stage gets the text of one token at a time.

No turn of the event loop serialises a thousand tokens. A stop string that is almost complete may hold as many back, and
so may a run of special tokens without text. Each may have twenty log probabilities, and all choices may release theirs
in one engine step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from attrs import define, field

from actors.text.detokenizer import IncrementalDetokenizer
from actors.text.formats.stage import PLAIN, CallPiece, Piece, ReasoningPiece, Stage, TextPiece
from actors.text.whole_tokens import WholeTokens
from protocol.dialects.logprobs import split_text
from protocol.messages.generation import Logprob
from protocol.messages.text import AnswerPiece, CallPart, Reasoning, Text

# Tokens with log probabilities in one piece.
SCORED_A_PIECE = 4
# Pieces that leave in a step: more than arrive in one, so that the number of waiting pieces falls.
PIECES_A_STEP = 2


@define(eq=False)
class StagedText:
    """The text of one choice in order, in pieces of a few log probabilities each."""

    detokenizer: IncrementalDetokenizer
    stage: Stage = PLAIN
    table: WholeTokens | None = None  # the model's own, if whole tokens may skip the stage
    scored_max: int = SCORED_A_PIECE  # tokens with log probabilities in a reply
    one_call: bool = False  # the text ends behind its first call
    complete: bool = False  # it has ended there: all that comes is left out
    # A text passes from one of these to the next: it waits for the stage; the stage holds some of its characters back;
    # its characters are all in pieces, but its tokens are in no reply yet. `_held` has it with the end of its range.
    _waiting: deque[Iterator[Text]] = field(factory=deque)
    _held: deque[tuple[int, Text]] = field(factory=deque)
    _owed: list[Text] = field(factory=list)
    reasoning_tokens: int = 0  # that have been given
    _fed: int = 0  # characters that the stage has got
    _ending: bool = False
    _cut: bool = False

    def __attrs_post_init__(self) -> None:
        if self.detokenizer.whole_tokens is None:
            self.table = None
        if self.stage is not PLAIN:
            self._choose_table()

    def take(self, ids: Sequence[int], logprobs: Sequence[Logprob] = ()) -> None:
        """Take the next token ids."""
        if self.stage is not PLAIN and len(ids) > 1:
            for index, token in enumerate(ids):
                self.take((token,), logprobs[index : index + 1])
        elif (text := self.detokenizer.feed(ids, logprobs)) is not None:
            self._wait(text)

    def finish(self, *, cut: bool = False) -> None:
        """Take the end of the text; `cut` at its limit of tokens. A client's stop string cuts it off as well."""
        if (text := self.detokenizer.finish()) is not None:
            self._wait(text)
        self._ending, self._cut = True, cut or isinstance(self.detokenizer.matched, str)

    def give(self, pieces_max: int) -> list[AnswerPiece]:
        """Return the next pieces, about `pieces_max` at most: a stage may make several of one text."""
        out: list[AnswerPiece] = []
        while self._waiting and len(out) < pieces_max:
            if (text := next(self._waiting[0], None)) is None:
                self._waiting.popleft()
            elif self.stage is PLAIN:
                out.append(text)
            else:
                out += self._staged(text)
        if self._ending and not self._waiting:
            self._ending = False
            out += self._end()
        if self.stage is not PLAIN:
            self._choose_table()
        return out

    def _wait(self, text: Text) -> None:
        short = len(text.logprobs) <= self.scored_max
        self._waiting.append(iter((text,)) if short else split_text(text, self.scored_max))

    def _staged(self, text: Text) -> list[AnswerPiece]:
        watched = self.stage.watched
        if watched is not None and not (self._held or self._owed) and watched.isdisjoint(text.text):
            return [text]
        if self.complete:
            self._owed.append(text)
            return []
        self._fed += len(text.text)
        self._held.append((self._fed, text))
        pieces = self.stage.feed(text.text) if text.text else ()
        certain = self._fed - self.stage.held
        while self._held and self._held[0][0] <= certain:
            self._owed.append(self._held.popleft()[1])
        return self._replies(self._up_to_call(pieces))

    def _up_to_call(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return the pieces up to the end of the first call, if it ends the text."""
        if not self.one_call:
            return pieces
        calls = [place for place, piece in enumerate(pieces) if isinstance(piece, CallPiece) and piece.index == 0]
        if not calls:
            return pieces
        self.complete = True
        # The stage holds text of these, or of what comes behind the call.
        self._owed += [text for _, text in self._held]
        self._held.clear()
        return pieces[: calls[-1] + 1]

    def _end(self) -> list[AnswerPiece]:
        pieces = () if self.complete else self._up_to_call(self.stage.end(cut=self._cut))
        self._owed += [text for _, text in self._held]
        self._held.clear()
        if not pieces and any(text.logprobs or text.ids for text in self._owed):
            pieces = (TextPiece(""),)
        return self._replies(pieces)

    def _replies(self, pieces: Sequence[Piece]) -> list[AnswerPiece]:
        """Return a reply for each piece, the last one with the tokens that are owed."""
        if not pieces:
            return []
        owed, self._owed = self._owed, []
        return [*(self._reply(piece, ()) for piece in pieces[:-1]), self._reply(pieces[-1], owed)]

    def _reply(self, piece: Piece, texts: Sequence[Text]) -> AnswerPiece:
        tokens, choice = sum(text.tokens for text in texts), self.detokenizer.choice
        logprobs = tuple(entry for text in texts for entry in text.logprobs)
        ids = tuple(token for text in texts for token in text.ids)
        match piece:
            case TextPiece(text):
                return Text(text, tokens, choice, logprobs, ids)
            case ReasoningPiece(text):
                self.reasoning_tokens += tokens
                return Reasoning(text, tokens, choice, logprobs, ids)
            case CallPiece(index, name, arguments):
                return CallPart(index, name, arguments, tokens, choice, logprobs, ids)

    def _choose_table(self) -> None:
        """Choose the tokens that skip the stage: the whole tokens that it lets pass, once nothing before them waits."""
        watched = None if self._waiting or self._held or self._owed else self.stage.watched
        passing = None if self.table is None or watched is None else self.table.without(watched)
        self.detokenizer.whole_tokens = passing
