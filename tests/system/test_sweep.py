"""Cancel, cut or crash at every single step of the scheduler, and check that nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest
import trio

from protocol.errors import ActorLost, EngineLost, LinkLost
from tests.rig.fake_engine import Costs, generate
from tests.rig.scheduler import sweep, taking_turns
from tests.rig.small_system import SmallSystem, living
from tests.system.simulator import counting, tasks


def leave(_: SmallSystem, victim: trio.CancelScope) -> None:
    victim.cancel(reason="sweep")


def cut_the_front(system: SmallSystem, _: trio.CancelScope) -> None:
    system.transports["front"].cut()


def cut_the_line(system: SmallSystem, _: trio.CancelScope) -> None:
    system.transports["line 0"].cut()


def crash_the_host(system: SmallSystem, _: trio.CancelScope) -> None:
    system.hosts[0].crash()


async def sweep_one(
    rng: Random, step: int, act: Callable[[SmallSystem, trio.CancelScope], None], tokens_max: int
) -> bool:
    """Do `act` just before the step; return whether that came before the victim had ended."""
    costs = Costs(slots=1, step_s=0.05, prefill_s=0.01, release_s=0.03)
    async with living(SmallSystem(costs=costs, inbox_size=1, streams=3)) as system:
        victim, submitted = trio.CancelScope(), []

        async def ask(name: str, scope: trio.CancelScope) -> None:
            with scope:
                try:
                    await system.ask(generate(name, tokens_max=tokens_max))
                except (LinkLost, EngineLost, ActorLost):
                    if act is leave:
                        raise
            if scope.cancelled_caught:
                await trio.sleep(0.04)  # a little longer than a release takes, and shorter than a step
                assert not system.hosts[0].scheduler.holds(name), "whoever leaves is aborted"
                submitted.append(f"submit {name}" in system.hosts[0].scheduler.log)

        with counting(step, lambda: act(system, victim)) as steps:
            async with trio.open_nursery() as clients:
                clients.start_soon(ask, "victim", victim)
                clients.start_soon(ask, "bystander", trio.CancelScope())
        await trio.sleep(30)
        await system.check_at_rest()
        with trio.fail_after(5):
            await system.ask(generate("after"))
        await trio.sleep(1)
        await system.check_at_rest()
        served = {line.partition(" ")[2] for host in system.hosts.values() for line in host.scheduler.log}
        assert "after" in served
        if act is leave:
            assert "bystander" in served, "who stays is served"
            assert submitted in ([], ["victim" in served]), "nothing begins for one who has left"
            assert len({life.path for life in system.child_events}) * 2 == len(system.child_events), (
                "it restarts nobody"
            )
    return steps.taken < step


async def stop_one(rng: Random, step: int) -> bool:
    """End the whole tree just before the step; return whether that came before its clients had ended."""
    async with living(
        SmallSystem(costs=Costs(slots=1, step_s=0.05, release_s=0.03), inbox_size=1, streams=3)
    ) as system:
        ended = []

        async def ask(name: str) -> None:
            with trio.move_on_after(20) as late, suppress(LinkLost, EngineLost, ActorLost):
                await system.ask(generate(name, tokens_max=2))
            ended.append((name, late.cancelled_caught and system.front.current is not None))

        with counting(step, system.scope.cancel) as steps:
            async with trio.open_nursery() as clients:
                for name in "abc":
                    clients.start_soon(ask, name)
        assert len(ended) == 3
        assert not any(hung for _, hung in ended)
        if steps.taken >= step:
            await trio.sleep(10)
            assert system.over.is_set(), "the tree did not end"
            assert not {"host", "line", "front.asker", "front.server"} & set(tasks())
            assert trio.current_time() < 40
    return steps.taken < step


def test_the_tree_can_be_stopped_at_every_step() -> None:
    sweep(stop_one)


def test_a_client_that_leaves_at_any_step_leaves_nothing() -> None:
    sweep(lambda rng, step: sweep_one(rng, step, leave, 2))


@pytest.mark.parametrize(("death", "first", "every"), taking_turns([cut_the_front, cut_the_line, crash_the_host]))
def test_a_death_at_any_step_leaves_nothing(
    death: Callable[[SmallSystem, trio.CancelScope], None], first: int, every: int
) -> None:
    sweep(lambda rng, step: sweep_one(rng, step, death, 2), first=first, every=every)
