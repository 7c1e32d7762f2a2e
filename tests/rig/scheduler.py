"""A scheduler and a clock that a seed determines, and instruments that count the scheduler's steps."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.rig.turn_cost import COUNTED_EVERY, Costs, warm

DEADLOCKED_S = 1e6  # of virtual time, so at once when nothing else is left to happen


def simulate(scenario: Callable[[random.Random], Awaitable[object]], seed: int) -> object:
    """Run `scenario(rng)` so that the seed decides everything: time, order, faults.

    A deadlock is a failure, and so is, in the seeds in which that is counted, a turn of the event loop that does too much.
    """
    from trio._core import _run  # the one private import; see python-trio/trio#3089

    async def bounded(rng: random.Random) -> object:
        with trio.fail_after(DEADLOCKED_S):
            return await scenario(rng)

    chance = _run._r  # noqa: SLF001  # by which it orders tasks
    before = chance.getstate()
    chance.seed(seed)
    warm()
    costs = Costs()
    counted = [costs] if seed % COUNTED_EVERY == 0 else []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
            result = trio.run(bounded, random.Random(seed), clock=MockClock(autojump_threshold=0), instruments=counted)
        costs.check()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    else:
        return result
    finally:
        chance.setstate(before)


class Steps(trio.abc.Instrument):
    """Counts the steps that tasks take, by the task's name, and acts just before the `act_at`-th of all."""

    def __init__(self, act_at: int = -1, act: Callable[[], None] | None = None) -> None:
        self.act_at, self.act = act_at, act
        self.taken = 0
        self.by_name: dict[str, int] = {}

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken += 1
        name = task.name.rpartition(".")[2]
        self.by_name[name] = self.by_name.get(name, 0) + 1
        if self.taken == self.act_at and self.act is not None:
            self.act()


@contextmanager
def counting(act_at: int = -1, act: Callable[[], None] | None = None) -> Iterator[Steps]:
    """Count the steps taken while the body runs."""
    steps = Steps(act_at, act)
    trio.lowlevel.add_instrument(steps)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(steps)


def tasks(task: trio.lowlevel.Task | None = None) -> list[str]:
    """Name every task that lives below `task`, or below the root."""
    task = task or trio.lowlevel.current_root_task()
    assert task is not None
    return sorted(
        name
        for nursery in task.child_nurseries
        for child in nursery.child_tasks
        for name in (child.name, *tasks(child))
    )


STEPS_MAX = 5_000


def taking_turns(cases: Sequence[object], *, stride: int = 1) -> list[pytest.ParameterSet]:
    """Return the cases of a sweep, with the first step of each and the distance to its next.

    Of the `stride`-th steps each has one case, since the cases take turns; in the nightly tests each step has all.
    """
    every = stride * len(cases)
    names = [getattr(case, "__name__", str(case)) for case in cases]
    fast = [pytest.param(case, 1 + stride * turn, every, id=names[turn]) for turn, case in enumerate(cases)]
    return fast + [
        pytest.param(case, 1, 1, id=f"{name} at every step", marks=pytest.mark.nightly)
        for case, name in zip(cases, names, strict=True)
    ]


def sweep(
    at_step: Callable[[random.Random, int], Awaitable[bool]], steps_min: int = 60, first: int = 1, every: int = 1
) -> None:
    """Run `at_step` with one step number after the other, until it returns that its scenario was over by then.

    It begins with step `first`, and takes each `every`-th.
    """
    logging.disable(logging.CRITICAL)  # thousands of restarts, all of them wanted

    async def scenario(rng: random.Random) -> bool:
        return await at_step(rng, step)

    try:
        for step in range(first, STEPS_MAX, every):
            try:
                if simulate(scenario, seed=1):
                    break
            except BaseException as error:
                error.add_note(f"at step {step}")
                raise
        else:
            pytest.fail("the sweep did not end")
    finally:
        logging.disable(logging.NOTSET)
    assert step > steps_min, "the scenario has many steps"
