"""The workers of one attempt of a request, and the reservations at them until they are asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from attrs import define, evolve, field, frozen

from actors.routing.candidates import Choice, TakenChoice
from actors.routing.outliers import Ejection, OutlierDetector
from actors.routing.ports import Replies, Worker
from actors.routing.reservations import Reservations
from actors.routing.slot_shares import SlotShares
from protocol.messages.generation import FinishReason, Generate, RouteTaken


@frozen
class FailoverLimits:
    """Limits on resuming a request after the loss of a worker: how late, how often, and with how many tokens sent."""

    resumes_max: int = 3
    drains_max: int = 64  # losses without a failure: the node drains, or a newer link replaced the one to it
    crashes_max: int = 1  # engine crashes under one request, which may cause them
    resume_tokens_max: int = 65_536
    resume_s: float = 10.0  # longest time to find another worker
    move_after_s: float = 2.0  # wait at an overcommitted worker, after which another may begin the request
    moves_max: int = 2
    preemptions_max: int = 1  # preemptions of one request, by engines that go on with others
    ejection: Ejection = Ejection()  # limits of the ejection of failing workers
    pause_s: float = 0.1  # pause before a lost worker is asked again, if there is no other
    pause_max_s: float = 2.0  # the same for a worker that stays unready: twice as long each time, up to this


@frozen
class Chosen:
    """A worker, and why it was chosen."""

    worker: Worker
    choice: Choice


@define(eq=False)
class Route:
    """The workers of one attempt: one that computes all of the request, or a decode and its prefill.

    Each worker has a reservation until it is asked, for the uncached tokens of the prompt. `end` must always be called:
    it releases the reservations at workers not asked, and the slot of the request's owner.
    """

    chosen: Chosen  # the decode, or the worker that computes all
    chosen_prefill: Chosen | None
    _reservations: Reservations
    _shares: SlotShares
    _outliers: OutlierDetector
    _wake: Callable[[], None]  # tasks that wait for a reservation or a probe to end
    _prompt: int  # tokens
    _owner: str | None  # of the request, until its slot is given back
    _reserved: list[str] = field(init=False)
    _pending: tuple[str, str] | None = field(init=False, default=None)  # set while the prompt has not begun
    _taken: list[TakenChoice] = field(init=False, factory=list)
    _has_begun: bool = field(init=False, default=False)
    probed: list[str] = field(init=False)  # names of ejected workers, or of the pair, that this request probes

    def __attrs_post_init__(self) -> None:
        self._reserved = list(self.names)
        for name in self._reserved:
            self._reservations.reserve(name, self.uncached)
        if self.prefill is not None:
            self._pending = self.prefill.full_name, self.decode.full_name
            self._reservations.add(*self._pending, self.uncached)
        for chosen in (self.chosen, self.chosen_prefill):
            if chosen is not None and chosen.choice.on_taken is not None and (taken := chosen.choice.on_taken()):
                self._taken.append(taken)
        if self._owner is not None:
            self._shares.take(self._owner, self.decode.full_name)
        self.probed = [name for name in {*self.names, self.name} if self._outliers.begin_probe(name, self)]

    @property
    def decode(self) -> Worker:
        """The worker that computes the answer."""
        return self.chosen.worker

    @property
    def prefill(self) -> Worker | None:
        """The worker that computes the prompt, None if the decode does so itself."""
        return None if self.chosen_prefill is None else self.chosen_prefill.worker

    @property
    def overlap(self) -> int:
        """The prompt tokens expected in its worker's prefix cache at the choice."""
        return (self.chosen_prefill or self.chosen).choice.overlap

    @property
    def predicted(self) -> int | None:
        """The same, None if the policy compared no such numbers."""
        return None if (self.chosen_prefill or self.chosen).choice.score is None else self.overlap

    @property
    def cached(self) -> int:
        """The prompt tokens in that cache already at the choice, as far as reported."""
        return (self.chosen_prefill or self.chosen).choice.cached

    @property
    def blind(self) -> bool:
        """Whether it was chosen before all workers had reported their blocks."""
        return (self.chosen_prefill or self.chosen).choice.blind

    @property
    def taken(self) -> RouteTaken:
        """Its description, for the answer's beginning."""
        return RouteTaken(self.name, self.overlap, (self.chosen_prefill or self.chosen).choice.score)

    @property
    def uncached(self) -> int:
        """The prompt tokens not in the cache yet, even if an earlier request is to compute them."""
        return max(0, self._prompt - self.cached)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Its workers."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its workers."""
        return tuple(worker.full_name for worker in self.workers)

    @property
    def name(self) -> str:
        """The name of its worker, or of the pair."""
        return self.decode.full_name if self.prefill is None else pair_name(self.prefill, self.decode)

    @property
    def overcommitted(self) -> bool:
        """Whether one of its workers is overcommitted."""
        return any(worker.load.overcommitted for worker in self.workers)

    @asynccontextmanager
    async def ask(self, worker: Worker, request: Generate) -> AsyncIterator[Replies]:
        """Ask one of its workers, which counts the request itself from then on."""
        self._release(worker.full_name)
        if request.hints is not None:
            # A prompt whose log probabilities are wanted is computed whole, whatever the cache has of it.
            finds = worker is (self.prefill or self.decode) and not request.prompt_logprobs
            cached = self.cached if finds else 0
            request = evolve(request, hints=None, cached_tokens=cached)
        try:
            async with worker.ask(request, request.sampling.tokens_max) as replies:
                yield replies
        finally:
            if worker is self.prefill:
                self._stop_pending()  # as the worker stops counting it in this turn: waiting tasks look in the next

    def begun(self) -> None:
        """Note that the prompt is computed; idempotent."""
        if not self._has_begun:
            self._has_begun = True
            for taken in self._taken:
                taken.begun()
        self._stop_pending()

    def answered(self, ids: Sequence[int], reason: FinishReason) -> None:
        """Note that the whole request is answered by these tokens; mostly the last one is not computed."""
        info = self.decode.info
        if reason is not FinishReason.STOP or info is None or not info.computes_ahead:
            ids = ids[:-1]
        for taken in self._taken:
            taken.answered(ids)

    def _stop_pending(self) -> None:
        if self._pending is not None:
            self._reservations.discard(*self._pending, self.uncached)
            self._pending = None

    def end(self) -> None:
        """Release the reservations at workers that were not asked and the owner's slot, and end the probes."""
        self.end_attempt()
        self.give_slot_back()

    def give_slot_back(self) -> None:
        """Stop counting the slot of the request's owner; idempotent.

        A request that goes on elsewhere has its next route first: or another one of its owner, which waits to begin,
        would take its place.
        """
        owner, self._owner = self._owner, None
        if owner is not None and self._shares.give_back(owner, self.decode.full_name):
            self._wake()

    def end_attempt(self) -> None:
        """Release everything but the owner's slot; idempotent."""
        holds = bool(self._reserved or self.probed or self._pending)
        self._stop_pending()
        for taken in self._taken:
            taken.ended()
        self._taken.clear()
        if not holds:
            return
        for name in tuple(self._reserved):
            self._release(name)
        for name in self.probed:
            self._outliers.end_probe(name, self)
        self._wake()

    def _release(self, name: str) -> None:
        self._reserved.remove(name)
        self._reservations.release(name, self.uncached)


def pair_name(prefill: Worker, decode: Worker) -> str:
    """Return the name of a prefill and a decode as a pair."""
    return f"{prefill.full_name}+{decode.full_name}"
