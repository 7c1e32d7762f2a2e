"""Leave, cut, crash or stop at each stage and at every step of an operation of an engine: nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from random import Random

import pytest
import trio
from attrs import define, field, frozen

from protocol.engine_state import EngineState
from protocol.errors import ActorLost, EngineLost, LinkLost, NotReady
from protocol.messages.kind import Message
from protocol.messages.leaving import RunningRequests
from protocol.messages.memory import ReleaseMemory, ResumeMemory
from protocol.messages.weights import BeginWeightsUpdate, EndWeightsUpdate, UpdateWeightsFromDisk
from tests.rig.fake_engine import Costs, generate
from tests.rig.scheduler import simulate, sweep, taking_turns
from tests.rig.small_system import SmallSystem, living
from tests.system.simulator import counting, tasks
from tests.system.simulator.programs import tensors

LOST = (LinkLost, EngineLost, ActorLost, NotReady)
BEFORE, CLEARS, ENGINE, ENDED = "before", "clears", "engine", "ended"
STAGES = (BEFORE, CLEARS, ENGINE, ENDED)
"""Not begun; running requests on their way out; the engine's own part; carried out, and not yet answered."""

Act = Callable[[SmallSystem, trio.CancelScope], None]


def releases(running: RunningRequests) -> tuple[Message, ...]:
    """Return a release of memory and its return."""
    return ReleaseMemory(running=running), ResumeMemory()


PROGRAMS: dict[str, tuple[Message, ...]] = {
    "drain": releases(RunningRequests.DRAIN),
    "end": releases(RunningRequests.END),
    "hold": releases(RunningRequests.HOLD),
    "disk": (UpdateWeightsFromDisk(folder="/new", version="new", running=RunningRequests.HOLD),),
    "session": (
        BeginWeightsUpdate(running=RunningRequests.DRAIN),
        tensors(Random(1)),
        EndWeightsUpdate("new"),
    ),
}


def leave(_: SmallSystem, asker: trio.CancelScope) -> None:
    asker.cancel(reason="sweep")


def stop(system: SmallSystem, _: trio.CancelScope) -> None:
    system.scope.cancel(reason="sweep")


def cut_the_front(system: SmallSystem, _: trio.CancelScope) -> None:
    system.transports["front"].cut()


def cut_the_line(system: SmallSystem, _: trio.CancelScope) -> None:
    system.transports["line 0"].cut()


def crash_the_host(system: SmallSystem, _: trio.CancelScope) -> None:
    system.hosts[0].crash()


@define(eq=False)
class Operated:
    """An engine with one request and another in wait, while an operator carries out a program by its node's link."""

    system: SmallSystem
    program: Sequence[Message]
    asker: trio.CancelScope = field(factory=trio.CancelScope)
    asked: int = 0
    ended: list[str] = field(factory=list)

    @property
    def stage(self) -> str:
        """The stage of the first operation."""
        life = self.system.lives[0].current
        if self.asked == 0 or life is None:
            return ""
        if "host.operate" in tasks():
            return ENGINE
        if life.state.operation:
            return CLEARS
        is_first = life.state == EngineState() and self.system.hosts[0].engine.weights.version == "default"
        return BEFORE if is_first else ENDED

    async def run(self) -> None:
        """Run the clients and the operator to their ends."""
        async with trio.open_nursery() as nursery:
            for name in ("one", "two"):
                nursery.start_soon(self._stream, name)
            await trio.sleep(0.12)
            await self._operate()

    async def _stream(self, name: str) -> None:
        with suppress(*LOST), trio.move_on_after(20):
            await self.system.ask(generate(name, tokens_max=6))
        self.ended.append(name)

    async def _operate(self) -> None:
        with self.asker, suppress(*LOST), trio.move_on_after(20):
            for request in self.program:
                link = await self.system.front.wait()
                self.asked += 1
                async with link.ask(request, 0, "0") as answer:
                    await answer.result()
        self.ended.append("operator")


def system() -> SmallSystem:
    """Return a system of one engine with one slot."""
    return SmallSystem(costs=Costs(slots=1, step_s=0.05, prefill_s=0.01, release_s=0.03), inbox_size=2, streams=5)


async def check_whole(operated: Operated, *, restarts: bool) -> None:
    """Check that nothing is left of clients and operator once the operator's work is put right, and that all is well."""
    system = operated.system
    await trio.sleep(30)
    assert len(operated.ended) == 3
    await system.put_right()
    await system.check_at_rest()
    with trio.fail_after(5):
        await system.ask(generate("after"))
    await trio.sleep(1)
    await system.check_at_rest()
    if not restarts:
        assert len({life.path for life in system.child_events}) * 2 == len(system.child_events), "it restarts nobody"


def check_stopped(operated: Operated) -> None:
    """Check that nothing is left of a node that has ended."""
    assert operated.system.over.is_set(), "the tree did not end"
    assert len(operated.ended) == 3
    assert not {"host", "host.operate", "line", "front.asker", "front.server"} & set(tasks())
    assert trio.current_time() < 60


# Stages ---------------------------------------------------------------------------------------


class AtStage(trio.abc.Instrument):
    """Acts once, just before the first step in which an operation is in a stage."""

    def __init__(self, operated: Operated, stage: str, act: Callable[[], None]) -> None:
        self.operated, self.stage, self.act = operated, stage, act
        self.acted = False

    def before_task_step(self, _: trio.lowlevel.Task) -> None:
        if not self.acted and self.operated.stage == self.stage:
            self.acted = True
            self.act()


@contextmanager
def at_stage(operated: Operated, stage: str, act: Act) -> Iterator[AtStage]:
    """Act at a stage while the body runs."""
    instrument = AtStage(operated, stage, lambda: act(operated.system, operated.asker))
    trio.lowlevel.add_instrument(instrument)
    try:
        yield instrument
    finally:
        trio.lowlevel.remove_instrument(instrument)


@pytest.mark.parametrize(
    "act", [leave, cut_the_front, cut_the_line, crash_the_host, stop], ids=lambda act: act.__name__
)
@pytest.mark.parametrize(("name", "stage"), [*product(PROGRAMS, STAGES)])
def test_nothing_is_left_of_an_operation_that_is_disturbed_at_a_stage(name: str, stage: str, act: Act) -> None:
    async def scenario(_: Random) -> None:
        async with living(system()) as running:
            operated = Operated(running, PROGRAMS[name])
            with at_stage(operated, stage, act) as instrument:
                await operated.run()
            assert instrument.acted, "there is no such stage"
            if act is stop:
                await trio.sleep(10)
                check_stopped(operated)
            else:
                await check_whole(operated, restarts=act is not leave)

    simulate(scenario, 1)


# Every step -----------------------------------------------------------------------------------


@frozen
class Case:
    """A program, and what disturbs it."""

    name: str
    act: Act

    @property
    def __name__(self) -> str:
        return f"{self.name} {self.act.__name__}"


async def disturb_at(rng: Random, step: int, name: str, act: Act) -> bool:
    """Do `act` just before the step; return whether that came before the program had ended."""
    async with living(system()) as running:
        operated = Operated(running, PROGRAMS[name])
        with counting(step, lambda: act(running, operated.asker)) as steps:
            await operated.run()
        if act is stop and steps.taken >= step:
            await trio.sleep(10)
            check_stopped(operated)
        else:
            await check_whole(operated, restarts=act is not leave)
    return steps.taken < step


CASES = [Case(*each) for each in product(PROGRAMS, (leave, stop, crash_the_host, cut_the_line))]


@pytest.mark.parametrize(("case", "first", "every"), taking_turns(CASES))
def test_an_operation_that_is_disturbed_at_any_step_leaves_nothing(case: Case, first: int, every: int) -> None:
    sweep(lambda rng, step: disturb_at(rng, step, case.name, case.act), first=first, every=every)
