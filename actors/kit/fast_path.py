"""The fast path of an answer: plain tokens go from where they arrive straight to the last asker of a chain of relays.

A reply passes through the answers of a chain, and each stage between two of them does its part. Most tokens mean the
same to all stages: there is one more, at this time. By the next step of an engine each stage's memory is cold, and
reading it takes longer than all else. So while a path is open a token touches one object, and the stages that it has
skipped record it later, several tokens at once: `settle`.

No stage can see the difference: any other event of an answer in the chain (another reply, its end, a deadline, an asker
that leaves) settles first. A reply that is not a plain token goes the general way, through all stages; so does every
token while the path is not open. Only the stage with the payloads opens it. The chain is built from the last asker
towards the source: each stage attaches the answer that it relays. It is cut where an answer ends. An error of the last
asker's receiver, or of a recording stage, is raised by its own relay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Never, Protocol, TypeAlias, TypeVar

from attrs import define, field

Payload = TypeVar("Payload", contravariant=True)
Reply = TypeVar("Reply")
ReplyPut = TypeVar("ReplyPut", contravariant=True)

TOKENS_MAX = 256  # the most tokens that are recorded at once

Record: TypeAlias = Callable[[Sequence[int], float], None]
"""Records tokens that have skipped a stage, and when the last of them came."""


class RelayedAnswer(Protocol):
    """The part of an answer that its fast path needs."""

    credit: int
    fast_path: AnyFastPath | None

    def fail_relay(self, error: Exception) -> None:
        """End the relay of this answer with an error."""


@define(eq=False)
class FastPath(Generic[Payload]):
    """The fast path of one answer; `receiver` gets the payload of each token and the time, and may raise."""

    receiver: Callable[[Payload, float], None]
    _payloads: Mapping[int, Payload | None] = field(factory=dict)
    _room: int = 0  # tokens until the next `settle`; 0 while the path is not open
    _tokens: list[int] = field(factory=list)  # tokens not recorded by the stages yet
    _last_at: float = 0.0
    _answers: list[RelayedAnswer] = field(factory=list)  # in order, from the last asker's to the source's
    _records: list[Record] = field(factory=list)  # one of each answer's stage
    _opened: bool = False

    @property
    def is_open(self) -> bool:
        """Whether plain tokens may take the path."""
        return self._opened

    def take(self, token: int, now: float) -> bool:
        """Take the next token of the source; False: it has to go the general way."""
        tokens = self._tokens
        if len(tokens) >= self._room:
            return False
        try:
            payload = self._payloads[token]
        except Exception:  # noqa: BLE001  # it rises again on the general way, in the stage with the payloads
            return False
        if payload is None:
            return False
        tokens.append(token)
        self._last_at = now
        try:
            self.receiver(payload, now)
        except Exception as error:  # noqa: BLE001  # it is raised again, in the task of the relay
            self._answers[0].fail_relay(error)
        return True

    def settle(self) -> None:
        """Let each stage record the tokens that have skipped it."""
        if not (tokens := self._tokens):
            return
        self._tokens = []
        for answer, record in zip(tuple(self._answers), tuple(self._records), strict=True):
            answer.credit -= len(tokens)
            try:
                record(tokens, self._last_at)
            except Exception as error:  # noqa: BLE001  # as if the stage had not been skipped
                answer.fail_relay(error)
        self.measure()

    def open(self, payloads: Mapping[int, Payload | None]) -> None:
        """Let tokens take the path from now on, if `payloads` has one for them."""
        self._payloads, self._opened = payloads, True
        self.measure()

    def close(self) -> None:
        """Let every token go the general way from now on."""
        self._opened, self._room = False, 0

    def measure(self) -> None:
        """Evaluate anew how many tokens may take the path; needed whenever the credit of an answer has changed."""
        credit = min((answer.credit for answer in self._answers), default=0) if self._opened else 0
        self._room = min(TOKENS_MAX, credit)

    # The chain --------------------------------------------------------------------------

    def attach(self, answer: RelayedAnswer, after: RelayedAnswer | None, record: Record) -> None:
        """Add an answer whose relay passes every token on to `after`, the last one so far (None: to the receiver)."""
        last = self._answers[-1] if self._answers else None
        if answer.fast_path is None and last is after:
            self.settle()
            answer.fast_path = self
            self._answers.append(answer)
            self._records.append(record)
            self.measure()

    def detach(self, answer: RelayedAnswer) -> None:
        """Cut an answer off the chain, with all answers behind it towards the source."""
        self.settle()
        if answer.fast_path is self:
            index = self._answers.index(answer)
            for gone in self._answers[index:]:
                gone.fast_path = None
            del self._answers[index:], self._records[index:]
            self.measure()


AnyFastPath: TypeAlias = FastPath[Never]
"""A fast path for a stage that neither reads nor opens it: any payload will do."""


class TokenAnswer(RelayedAnswer, Protocol[ReplyPut]):
    """An answer that a source puts tokens into."""

    def put(self, reply: ReplyPut, units: int = 1, /) -> None:
        """Hand over the next reply."""


def put_token(answer: TokenAnswer[Reply], token: int, now: float, reply_of: Callable[[int], Reply]) -> None:
    """Hand over one token without log probabilities, by the fast path if it is open, and otherwise as a reply."""
    path = answer.fast_path
    if path is None or not path.take(token, now):
        answer.put(reply_of(token), 1)


def ignore_tokens(_: Sequence[int], __: float) -> None:
    """Record nothing; for stages without a count of their own."""
