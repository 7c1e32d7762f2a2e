"""The text of one choice, from its detokeniser through its stage, in small replies.

A reply has the log probabilities, the ids and the number of the tokens that end in its text. While a stage holds text
back, the tokens of that text wait. They belong to the piece with their last character; the tokens of a marker belong to
the next piece, or to an empty one at the end. A stage gets the text of one token at a time.

No turn of the event loop serialises a thousand tokens. A stop string that is almost complete may hold as many back, and
so may a run of special tokens without text, or a call. Each may have twenty log probabilities, and all choices may
release theirs in one engine step. So replies leave over turns: in each as many as the new tokens made, and some that
wait. Log probabilities that a reply has no room for follow in empty replies of its kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from attrs import define, evolve, field

from actors.text.detokenizer import IncrementalDetokenizer
from actors.text.formats.stage import PLAIN, CallPiece, Piece, ReasoningPiece, Stage, TextPiece
from actors.text.whole_tokens import WholeTokens
from protocol.dialects.logprobs import split_text
from protocol.messages.generation import Logprob
from protocol.messages.text import AnswerPiece, CallPart, Reasoning, Text

INCOMPLETE = "\ufffd"  # stands for a character whose last bytes have not come
# Tokens with log probabilities in one reply.
SCORED_A_PIECE = 4
# Such replies that leave in a turn beside those of new tokens, so that the number of waiting ones falls.
PIECES_A_STEP = 2
# Texts that a turn reads and replies that it gives, beside those of new tokens.
TEXTS_A_TURN = 16
# Tokens with log probabilities that a stage holds back: each may take five kilobytes.
SCORED_HELD_MAX = 512


@define(eq=False)
class StagedText:
    """The text of one choice in order, in replies of a few log probabilities each."""

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
    _ready: deque[AnswerPiece] = field(factory=deque)  # replies for the next turns
    reasoning_tokens: int = 0  # that have been given
    _scored: int = 0  # tokens with log probabilities in `_held` and `_owed`
    _came: int = 0  # tokens since the last turn
    _fed: int = 0  # characters that the stage has got
    _ending: bool = False
    _cut: bool = False

    def __attrs_post_init__(self) -> None:
        if self.detokenizer.whole_tokens is None:
            self.table = None
        if self.stage is not PLAIN:
            self._choose_table()

    @property
    def waits(self) -> bool:
        """Whether `give` has to be called again, even if no more tokens come."""
        return bool(self._ready or self._waiting or self._ending)

    def take(self, ids: Sequence[int], logprobs: Sequence[Logprob] = ()) -> None:
        """Take the next token ids."""
        self._came += len(ids)
        if self.stage is PLAIN:
            self._wait(self.detokenizer.feed(ids, logprobs))
            return
        for index, token in enumerate(ids):
            self._wait(self.detokenizer.feed((token,), logprobs[index : index + 1]))

    def finish(self, *, cut: bool = False) -> None:
        """Take the end of the text; `cut` at its limit of tokens. A client's stop string cuts it off as well."""
        text = self.detokenizer.finish()
        if cut and text is not None and self.stage is not PLAIN:
            # A marker that was cut within a character would be no beginning of one.
            text = evolve(text, text=text.text.rstrip(INCOMPLETE))
        self._wait(text)
        # A plain stage has nothing to end, and most requests wait for no further turn.
        self._ending, self._cut = self.stage is not PLAIN, cut or isinstance(self.detokenizer.matched, str)

    def give(self) -> list[AnswerPiece]:
        """Return the replies of the next turn, those of one kind joined: all that new tokens made, and some more."""
        out: list[AnswerPiece] = []
        steps, scored = 2 * self._came + TEXTS_A_TURN, self._came + PIECES_A_STEP * self.scored_max
        self._came = 0
        while steps:
            steps -= 1
            if not self._ready:
                if not self._read():
                    break
                continue
            if (size := len(self._ready[0].logprobs)) > scored:
                break
            scored -= size
            reply = self._ready.popleft()
            if isinstance(reply, Reasoning):
                self.reasoning_tokens += reply.tokens
            self._add(reply, out)
        if self.stage is not PLAIN:
            self._choose_table()
        return out

    def _wait(self, text: Text | None) -> None:
        if text is not None:
            short = len(text.logprobs) <= self.scored_max
            self._waiting.append(iter((text,)) if short else split_text(text, self.scored_max))

    def _read(self) -> bool:
        """Read the next text that waits, or the end, into replies; return whether there was one."""
        while self._waiting:
            if (text := next(self._waiting[0], None)) is None:
                self._waiting.popleft()
                continue
            if self.stage is PLAIN:
                self._ready.append(text)
            else:
                self._stage(text)
            return True
        ended, self._ending = self._ending, False
        if ended:
            self._end()
        return ended

    def _stage(self, text: Text) -> None:
        if self.complete:
            self._owed.append(text)
            self._scored += len(text.logprobs)
            return
        watched = self.stage.watched
        if watched is not None and not (self._held or self._owed) and watched.isdisjoint(text.text):
            self._ready.append(text)
            return
        self._fed += len(text.text)
        self._held.append((self._fed, text))
        self._scored += len(text.logprobs)
        pieces = self.stage.feed(text.text) if text.text else ()
        certain = self._fed - self.stage.held
        while self._held and self._held[0][0] <= certain:
            self._owed.append(self._held.popleft()[1])
        self._reply(self._up_to_call(pieces))
        if self._scored > SCORED_HELD_MAX:
            # The last one shows that text is held back.
            while len(self._held) > 1:
                self._owed.append(self._held.popleft()[1])
            self._reply((TextPiece(""),))

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

    def _end(self) -> None:
        pieces = () if self.complete else self._up_to_call(self.stage.end(cut=self._cut))
        self._owed += [text for _, text in self._held]
        self._held.clear()
        if not pieces and any(text.logprobs or text.ids for text in self._owed):
            pieces = (TextPiece(""),)
        self._reply(pieces)

    def _reply(self, pieces: Sequence[Piece]) -> None:
        """Make a reply of each piece; the last one has the tokens that are owed, or the first of them."""
        if not pieces:
            return
        *others, piece = pieces
        self._ready.extend(self._made(each, ()) for each in others)
        owed, self._owed = self._owed, []
        self._scored -= sum(len(text.logprobs) for text in owed)
        texts, room = list[Text](), self.scored_max
        for text in owed:
            if (size := len(text.logprobs)) > room:
                self._ready.append(self._made(piece, texts))
                piece, texts, room = _emptied(piece), [], self.scored_max
            texts.append(text)
            room -= size
        self._ready.append(self._made(piece, texts))

    def _made(self, piece: Piece, texts: Sequence[Text]) -> AnswerPiece:
        tokens, choice = sum(text.tokens for text in texts), self.detokenizer.choice
        logprobs = tuple(entry for text in texts for entry in text.logprobs)
        ids = tuple(token for text in texts for token in text.ids)
        match piece:
            case TextPiece(text):
                return Text(text, tokens, choice, logprobs, ids)
            case ReasoningPiece(text):
                return Reasoning(text, tokens, choice, logprobs, ids)
            case CallPiece(index, name, arguments):
                return CallPart(index, name, arguments, tokens, choice, logprobs, ids)

    def _add(self, reply: AnswerPiece, out: list[AnswerPiece]) -> None:
        """Add a reply to those of its turn: to the last of them, if both are text or reasoning and few are scored."""
        last = out[-1] if out else None
        if last is None or isinstance(last, CallPart) or isinstance(reply, CallPart) or type(last) is not type(reply):
            out.append(reply)
            return
        if len(logprobs := last.logprobs + reply.logprobs) > self.scored_max:
            out.append(reply)
            return
        text, tokens = last.text + reply.text, last.tokens + reply.tokens
        out[-1] = type(reply)(text, tokens, reply.choice, logprobs, last.ids + reply.ids)

    def _choose_table(self) -> None:
        """Choose the tokens that skip the stage: the whole tokens that it lets pass, once nothing before them waits."""
        waits = self._waiting or self._held or self._owed or self._ready
        watched = None if waits else self.stage.watched
        passing = None if self.table is None or watched is None else self.table.without(watched)
        self.detokenizer.whole_tokens = passing


def _emptied(piece: Piece) -> Piece:
    """Return a piece of the same kind, and of the same call, without text."""
    return CallPiece(piece.index) if isinstance(piece, CallPiece) else type(piece)("")
