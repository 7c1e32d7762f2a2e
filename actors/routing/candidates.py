"""The candidates of a routing policy, and the policy's port.

Candidates are the workers of one leg that can be asked, have room, and are neither excluded nor ejected. They are found
only as far as a policy looks: a pool may have thousands of workers, and the cost of a choice must not grow with them.
So a policy with few names in mind uses `find`, or takes the first ones (`leading`); the cost of iteration grows with
the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from attrs import define, field, frozen

from actors.routing.load import BeginsNow, HasRoom, Load, begins, may_queue
from actors.routing.ports import Ranking, Worker
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate

LEADING_MAX = 64
"""The most least loaded workers that are compared if none has memory for a request."""


COMPARED_MAX = 16
"""The most compared workers whose costs are kept with a choice."""


def hands_over(worker: Worker) -> bool:
    """Whether the hand-off of a prefill is known, so that it can be asked together with a decode."""
    return worker.info is not None and worker.info.hand_off_address is not None


class TakenChoice(Protocol):
    """A taken choice, as its policy follows it; each method is called once at most, and `ended` always."""

    def begun(self) -> None:
        """The worker has computed the prompt."""

    def answered(self, ids: Sequence[int]) -> None:
        """It has answered the whole request, and has computed these tokens of the answer."""

    def ended(self) -> None:
        """It does not serve the request any more, whether the prompt has begun or not."""


@frozen
class Choice:
    """The worker that a policy prefers, by its load.

    `overlap` is the number of prompt tokens expected in its prefix cache when its turn comes, and `cached` the number
    there already: an earlier request may fail before it computes the difference. `score` is the compared number, None
    for a policy without one; `compared` has the costs of compared workers, `COMPARED_MAX` at most, for traces. It is
    `blind` if an available worker has not reported its blocks yet. A choice may come to nothing, so a policy records a
    taken one in `on_taken`, which may return a follower of the request.
    """

    load: Load
    overlap: int = 0
    cached: int = 0
    score: float | None = None
    blind: bool = False
    compared: tuple[tuple[str, float], ...] = field(default=(), eq=False, repr=False)
    on_taken: Callable[[], TakenChoice | None] | None = field(default=None, eq=False, repr=False)


class Candidates(Protocol):
    """The loads of the candidates of one leg."""

    def __iter__(self) -> Iterator[Load]:
        """Yield all of them; where they are ranked, the least loaded first."""

    def leading(self, request: Generate) -> Sequence[Load]:
        """Return the least loaded candidates for a request: all up to the first suitable one.

        A suitable one has memory for the request and no reservation. Ranked candidates are `LEADING_MAX` at most; else
        they may be all of them.
        """

    def find(self, name: str) -> Load | None:
        """Return the worker of that name if it is a candidate, or would be without its waiting prompts.

        None if not. A cached prompt may be computed sooner there than elsewhere as a whole. A moving request waits for
        no prompts: for it only candidates are found.
        """


class Policy(Protocol):
    """A routing policy: the choice of the worker of a request, for each leg of it.

    A request resumed after the loss of a worker has the tokens of its answer so far at the end of its prompt. A policy
    may be asked more than once for a request, and its choice may come to nothing.
    """

    def __call__(self, request: Generate, candidates: Candidates, /) -> Choice | None:
        """Return its choice, None if there are no candidates."""


Chance: TypeAlias = Callable[[], float]
"""Draws a number from 0 to below 1."""

AddReserved: TypeAlias = Callable[[Load], Load]
"""Adds a worker's reservations to its load."""


@define(eq=False)
class EligibleCandidates:
    """The candidates among some workers; `worker` finds the worker of a yielded load.

    `workers` are in the order of their ranks if `ranked`. `avoided` returns whether a worker is ejected: such workers
    are candidates only while all are ejected.
    """

    workers: Ranking | Sequence[Worker]
    ranked: bool
    has_room: HasRoom
    excluded: Collection[str]
    avoided: Callable[[str], bool] | None  # None: no worker is ejected
    with_reserved: AddReserved
    accepts: Callable[[Load], bool] | None = None  # a further condition on candidates
    _found: dict[str, Worker] = field(init=False, factory=dict)

    def __iter__(self) -> Iterator[Load]:
        """Yield the load of each candidate."""
        for worker in self._eligible(self.workers):
            load = worker.load
            if not self.has_room(load):
                if self.ranked and not begins(load):  # nor does any later one
                    return
                continue
            if (candidate := self._candidate(worker, load, self.has_room)) is not None:
                yield candidate

    def leading(self, request: Generate) -> list[Load]:
        """Return the candidates up to the first one that is preferred to all others."""
        leading = list[Load]()
        for load in self:
            leading.append(load)
            if self.ranked and (len(leading) >= LEADING_MAX or (not load.reserved and load.fits(request))):
                break
        return leading

    def find(self, name: str) -> Load | None:
        """Return the candidate of that name."""
        worker = self._named(name)
        if worker is None or name in self.excluded or (self.avoided is not None and self.avoided(name)):
            return None
        load = worker.load
        if not self._has_room_behind_prompts(load):
            return None
        return self._candidate(worker, load, self._has_room_behind_prompts)

    def _has_room_behind_prompts(self, load: Load) -> bool:
        return self.has_room(load) or (not isinstance(self.has_room, BeginsNow) and may_queue(load))

    def worker(self, load: Load) -> Worker:
        """Return the worker of a candidate."""
        return self._found[load.name]

    def _candidate(self, worker: Worker, load: Load, has_room: HasRoom) -> Load | None:
        """Return a load with the worker's reservations; None if the worker is then no candidate."""
        # A prefill whose address is not known yet can hand over to no decode.
        if worker.leg is Leg.PREFILL and not hands_over(worker):
            return None
        reserved = self.with_reserved(load)
        if reserved is not load:
            if not has_room(reserved):
                return None
            load = reserved
        if self.accepts is not None and not self.accepts(load):
            return None
        self._found[load.name] = worker
        return load

    def _named(self, name: str) -> Worker | None:
        if isinstance(self.workers, Sequence):
            return next((worker for worker in self.workers if worker.full_name == name), None)
        return self.workers.get(name)

    def _eligible(self, workers: Iterable[Worker]) -> Iterator[Worker]:
        """Yield the workers that are neither excluded nor ejected; if all others are ejected, the ejected ones.

        They keep their order, and each is examined only when it is asked for.
        """
        if self.avoided is None:
            yield from (worker for worker in workers if worker.full_name not in self.excluded)
            return
        ejected = list[Worker]()
        any_eligible = False
        for worker in workers:
            name = worker.full_name
            if name in self.excluded:
                continue
            if not self.avoided(name):
                any_eligible = True
                yield worker
            elif not any_eligible:
                ejected.append(worker)
        if not any_eligible:
            yield from ejected
