"""Single faults, and what they may cost the clients beside them.

With several faults at once, all that can be promised of an answer is that it is right or ends in an allowed error. With a
single one more is promised: how few answers it costs, and how long a client waits.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import log2
from typing import ClassVar

import trio
from attrs import define

from actors.routing.candidates import Candidates, Choice
from actors.routing.outliers import Ejection
from protocol.errors import InternalError
from protocol.messages.generation import Generate
from tests.rig.fake_engine import Costs, Scheduler
from tests.system.simulator import judge
from tests.system.simulator.clients import HttpClient, Reader
from tests.system.simulator.faults import Faults
from tests.system.simulator.model import VOCABULARY, PlannedRequest
from tests.system.simulator.pictures import Content
from tests.system.simulator.system import System

PATIENT: dict[str, object] = {
    "admit_s": 100.0,
    "first_token_s": 200.0,
    "total_s": 300.0,
    "requests_max": 8,
    "waiting_max": 16,
}
HEAVY_TOKENS = 24
SOON_S = 2.0  # for what happens without a delay


def ejection(rng: random.Random) -> Ejection:
    """Draw when a worker that keeps failing is ejected, and for how long."""
    return Ejection(
        failures_max=rng.choice((1, 3, 5)),
        window=rng.choice((4, 20)),
        ejected_s=rng.choice((0.3, 1.0)),
        ejected_max_s=4.0,
    )


@define(eq=False)
class HonestClient(HttpClient):
    """A client that sends one request after the other, and waits for each answer."""

    asked: int = 0
    crowds: bool = False  # may get `overloaded`

    def allowed(self, code: str) -> bool:
        return (self.crowds and code == "overloaded") or HttpClient.allowed(self, code)

    async def ask(
        self, tokens: int, n: int = 1, content: Content = "", errors: frozenset[str] = frozenset(), **headers: str
    ) -> tuple[str, float]:
        """Send one request; return its outcome, and how long it took. It may end in `errors`."""
        self.asked += 1
        text = f"{self.name}.{self.asked}"
        turns, stream = (("user", content or text),), self.rng.random() < 0.5
        wanted = PlannedRequest(turns=turns, tokens_max=tokens, n=n, stream=stream, errors=errors)
        reader, received, asked_at = Reader(self.system.connect()), judge.Received(), trio.current_time()
        try:
            await reader.send(self.post(wanted, **headers))
            await reader.read_answer(received)
        finally:
            reader.hang_up()
        took_s = round(trio.current_time() - asked_at, 9)
        outcome = self.judged(wanted, received, stayed=True)
        self.note(text, outcome, took_s)
        return outcome, took_s


@define(eq=False)
class SingleFault(ABC):
    """A single fault, and what must hold while it lasts."""

    system: System
    rng: random.Random
    faults: Faults
    note: Callable[..., None]
    drains: ClassVar[bool] = False  # the node shuts down meanwhile
    falls: ClassVar[tuple[type[Exception], ...]] = ()  # errors by which actors may end

    @staticmethod
    @abstractmethod
    def shape(rng: random.Random) -> dict[str, object]:
        """Draw the system in which this fault can be observed."""

    @abstractmethod
    async def live(self) -> None:
        """Inject the fault, remove it, and check the answers of others meanwhile."""

    def honest(self, name: str) -> HonestClient:
        """Return an honest client."""
        return HonestClient(self.system, self.rng, name, self.faults, self.note)


@define(eq=False)
class FailingEngine(SingleFault):
    """An engine that fails every request at once, and so is always the least loaded."""

    kind: ClassVar[str] = "black hole"
    pairs: int = 1  # workers or pairs that may be ejected because of it

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        return PATIENT | {"workers": rng.choice((2, 3))}

    async def live(self) -> None:
        system, rng = self.system, self.rng
        limits, clients = system.route.ejection, [self.honest(f"h{number}") for number in range(self.clients)]
        await trio.sleep(rng.random())
        scheduler, lasts_s = self.begin(), 1 + rng.random() * 3
        self.faults.happened.add(self.kind)
        self.note(self.kind, lasts_s)
        ends_at = trio.current_time() + lasts_s
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(self._ask_until, client, lambda: trio.current_time() >= ends_at)
        self.end(scheduler)
        tries = 2 + log2(1 + lasts_s / limits.ejected_s)
        most = self.pairs * (limits.failures_max + 2 * self.capacity + tries)
        assert scheduler.failed <= most, f"an engine that fails everything got {scheduler.failed} requests"
        system.routing.policy = self._any  # others may leave idle, and so never probe, one to which they prefer another
        with trio.fail_after(limits.ejected_max_s + 30 * SOON_S):
            async with trio.open_nursery() as nursery:
                for client in clients:
                    nursery.start_soon(self._ask_until, client, lambda: not system.routing.outliers)
        self.note(self.kind, scheduler.failed, "well again")

    @property
    def clients(self) -> int:
        """The number of clients."""
        return self.system.workers

    @property
    def capacity(self) -> int:
        """The number of requests that it may have when it is ejected."""
        return self.system.costs.slots + max(1, self.system.inbox_size)

    def begin(self) -> Scheduler:
        """Let one engine fail; return its scheduler."""
        scheduler: Scheduler = self.system.hosts[self.rng.randrange(self.system.workers)].scheduler
        scheduler.fails = InternalError("the engine fails everything")
        return scheduler

    def end(self, scheduler: Scheduler) -> None:
        """Remove the fault."""
        scheduler.fails = None

    def _any(self, _: Generate, candidates: Candidates, /) -> Choice | None:
        """Return any of the workers."""
        loads = list(candidates)
        return Choice(self.rng.choice(loads)) if loads else None

    async def _ask_until(self, client: HonestClient, enough: Callable[[], bool]) -> None:
        while not enough():
            await client.ask(self.rng.randint(1, 4))
            await trio.sleep(self.rng.choice((0.0, 0.05)))


@define(eq=False)
class UnfairKeys(SingleFault):
    """Keys with many heavy requests, and one with a small request now and then."""

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        secrets = {f"greedy{number}": f"secret-of-greedy-{number}" for number in range(rng.choice((1, 2)))}
        at_admission = rng.random() < 0.5  # the requests wait there; else for the engines
        places = {"requests_max": 8, "waiting_max": rng.choice((4, 16))} if at_admission else {"requests_max": 48}
        costs = Costs(slots=2, step_s=0.1, vocabulary_size=VOCABULARY)
        return PATIENT | places | {"secrets": secrets | {"modest": "secret-of-modest"}, "costs": costs, "far": False}

    async def live(self) -> None:
        system, greedy = self.system, [name for name in self.system.secrets if name != "modest"]
        slots, full = system.workers * system.costs.slots, system.requests_max == PATIENT["requests_max"]
        crowd, n = (24 // len(greedy), 4) if full else (8 // len(greedy), 5)
        async with trio.open_nursery() as nursery:
            for name in greedy:
                for number in range(crowd):
                    nursery.start_soon(self._crowd, name, number, n)
            await trio.sleep(1 + self.rng.random())
            one_s = HEAVY_TOKENS * system.costs.step_s  # for which a heavy answer keeps a slot
            gate_s = system.requests_max / slots * one_s if full else 0.0  # until one of those inside has ended
            # Among keys that hold nothing each has a turn, in any order: another's request has just ended.
            fair_s = len(greedy) * gate_s + (2 + len(greedy)) * one_s + SOON_S
            modest = self.honest("modest")
            for _ in range(3):
                outcome, took_s = await modest.ask(4, authorization=_key(system, "modest"))
                assert outcome == "whole", f"a small request ended in {outcome}"
                assert took_s <= fair_s, f"a small request took {took_s} s, not {fair_s} s"
                await trio.sleep(self.rng.random())
            nursery.cancel_scope.cancel()

    async def _crowd(self, name: str, number: int, n: int) -> None:
        client = self.honest(f"{name}.{number}")
        client.crowds = True
        while True:
            outcome, _ = await client.ask(HEAVY_TOKENS, n, authorization=_key(self.system, name))
            await trio.sleep(0.1 if outcome == "whole" else 2.0)  # a refusal costs the simulator more than an answer


@define(eq=False)
class StuckSlot(SingleFault):
    """A slot that is kept for a while after its client has left, in an engine that computes on."""

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        costs = Costs(slots=rng.choice((2, 3)), step_s=rng.choice((0.02, 0.05)), vocabulary_size=VOCABULARY)
        return PATIENT | {"workers": 1, "costs": costs, "far": False}

    async def live(self) -> None:
        system, rng = self.system, self.rng
        limits, host = system.deadlines, system.hosts[0]
        # Longer than it may before it is set aside, and shorter than an engine may before it is at fault, by what abort
        # and news of it may take on their way: a line of small pieces delays each of them.
        host.scheduler.keeps_s = limits.release_s + 0.1 + rng.random() * (limits.leak_s - 1.1)
        ends_at = trio.current_time() + limits.release_s + limits.leak_s + SOON_S
        self.note("a slot is kept", host.scheduler.keeps_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._leave)
            for number in range(system.costs.slots):
                nursery.start_soon(self._stay, self.honest(f"h{number}"), ends_at)
        assert host.scheduler.keeps_s == 0, "no client left while it was answered"
        assert system.hosts[0] is host, "one slot that was kept cost the engine"

    async def _leave(self) -> None:
        """Disconnect while a request is answered; one that still waited for a slot is repeated."""
        client, scheduler = self.honest("leaves"), self.system.hosts[0].scheduler
        while scheduler.keeps_s:
            with trio.move_on_after(1.0 + self.rng.random()):
                await client.ask(400)
            await trio.sleep(SOON_S / 4)

    async def _stay(self, client: HonestClient, ends_at: float) -> None:
        while trio.current_time() < ends_at:
            outcome, _ = await client.ask(self.rng.choice((5, 40)))
            assert outcome == "whole", f"a slot that is kept costs an answer: {outcome}"


def _key(system: System, name: str) -> str:
    return f"Bearer {system.secrets[name]}"
