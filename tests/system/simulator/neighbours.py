"""Engines that do not start, or crash again and again, beside engines that must not be affected."""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import ClassVar

import trio
from attrs import define, field

from actors.routing.route import FailoverLimits
from protocol.errors import StartFailed
from supervisor.supervision.events import ChildEventKind
from tests.rig.scheduler import tasks
from tests.rig.small_system import HANGS
from tests.system.simulator.single_fault import PATIENT, SOON_S, HonestClient, SingleFault

TOKENS_MAX = 8
START_S = 5.0  # after which a start that hangs has failed, and then it waits
CRASHES_AFTER_S = 0.5  # at most


@define(eq=False)
class BadEngine(SingleFault):
    """One engine of several that is unavailable for a while."""

    falls: ClassVar[tuple[type[Exception], ...]] = (StartFailed,)
    number: int = field(init=False)

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        workers = rng.choice((2, 3))
        return PATIENT | {"workers": workers, "route": FailoverLimits(), "streams": 12, "never_up": {}, "far": False}

    @abstractmethod
    async def go_wrong(self) -> None:
        """Make the engine unavailable for a while."""

    async def live(self) -> None:
        system = self.system
        others = {number: host for number, host in system.hosts.items() if number != self.number}
        async with trio.open_nursery() as nursery:
            for number in range(min(system.workers * system.costs.slots, system.requests_max)):
                nursery.start_soon(self._stay, self.honest(f"h{number}"))
            await self.go_wrong()
            assert all(system.hosts[number] is host for number, host in others.items()), "a neighbour was restarted"
            with trio.fail_after(START_S + 2 * SOON_S):
                while system.engines[self.number].current is None:  # noqa: ASYNC110  # of a tree that starts it
                    await trio.sleep(0.05)
                while not any(line.startswith("submit") for line in system.hosts[self.number].scheduler.log):  # noqa: ASYNC110
                    await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        failed = {event.path for event in system.child_events if event.kind is ChildEventKind.FAILED}
        own = f"node/worker {self.number}"
        assert all(path.startswith(own) for path in failed), f"others than {own} failed: {failed}"
        self.note("well again", len(failed))

    async def _stay(self, client: HonestClient) -> None:
        costs = self.system.costs
        one_s = TOKENS_MAX * (costs.step_s + costs.prefill_s) + costs.release_s
        while True:
            outcome, took_s = await client.ask(self.rng.randint(2, TOKENS_MAX))
            assert outcome == "whole", f"an engine that is down costs an answer: {outcome}"
            assert took_s <= 4 * one_s + SOON_S, f"an engine that is down keeps a client waiting for {took_s} s"


@define(eq=False)
class NeverUp(BadEngine):
    """An engine whose first start fails or hangs."""

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        drawn = BadEngine.shape(rng)
        workers = drawn["workers"]
        assert isinstance(workers, int)
        return drawn | {"never_up": {rng.randrange(workers): rng.choice(("fails", HANGS))}}

    def __attrs_post_init__(self) -> None:
        (self.number,) = self.system.never_up

    async def go_wrong(self) -> None:
        system, lasts_s = self.system, 1 + self.rng.random() * 6
        self.note("never up", self.number, system.never_up[self.number], lasts_s)
        own = f"node/worker {self.number}"
        up = {
            event.path: event.at
            for event in system.child_events
            if event.kind is ChildEventKind.STARTED and event.path != own
        }
        wanted = {f"node/worker {number}" for number in range(system.workers)} - {own}
        assert up.keys() >= wanted | {"node/gateway", "node/router", "node/processor"}, "another child waits for it"
        assert max(up.values()) - min(up.values()) <= SOON_S, "another child has started too late"
        await trio.sleep(lasts_s)
        system.never_up.clear()

    async def live(self) -> None:
        await BadEngine.live(self)
        await trio.sleep(2 * SOON_S)  # for connections to end
        self.system.heal_prefixes()
        await self.system.wait_trusted()  # else it may count the tasks while a worker is not watched
        # The tasks of the healthy system, without this one.
        self.system.tasks = [name for name in tasks() if name != f"{__name__}.{NeverUp.__name__}.live"]


@define(eq=False)
class CrashingNeighbour(BadEngine):
    """An engine that crashes again and again, soon after it has come up."""

    def __attrs_post_init__(self) -> None:
        self.number = self.rng.randrange(self.system.workers)

    async def go_wrong(self) -> None:
        system, ends_at = self.system, trio.current_time() + 2 + self.rng.random() * 4
        self.note("crashes again and again", self.number)
        while trio.current_time() < ends_at:
            await system.engines[self.number].wait()
            await trio.sleep(self.rng.random() * CRASHES_AFTER_S)
            system.hosts[self.number].crash()
            await trio.sleep(0.01)
