"""The status of each member of a tree, from its events."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import EngineDied
from supervisor.supervision.status import ERROR_LENGTH_MAX, TreeStatus
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import Backoff, Child, Strategy, Tree


async def serves(*, task_status: trio.TaskStatus[None]) -> None:
    task_status.started()
    await trio.sleep_forever()


def child(name: str, run: Callable[..., Awaitable[None]] = serves, **fields: Any) -> Child:
    return Child(name=name, run=run, about=f"it is {name}", **fields)


def states(status: TreeStatus) -> dict[Any, Any]:
    return {member.path: member.state for member in status.members()}


async def test_the_status_has_the_state_and_its_time_of_each_member(autojump_clock: MockClock) -> None:
    async def slow(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(2)
        await serves(task_status=task_status)

    tree = Tree(name="top", children=(child("a"), child("b", slow)))
    status = TreeStatus(tree)
    async with trio.open_nursery() as nursery:
        task = trio.CancelScope()

        async def run() -> None:
            with task:
                await supervise(tree, rng=random.Random(0), on_event=status.on_event)

        nursery.start_soon(run)
        await trio.sleep(1)
        assert states(status) == {"top": "starting", "top/a": "up", "top/b": "starting"}
        await trio.sleep(4)
        children = {member.path: member for member in status.members()}
        assert {path: (member.state, member.since_s) for path, member in children.items()} == {
            "top": ("up", 5),
            "top/a": ("up", 5),
            "top/b": ("up", 3),
        }
        assert [member.restarts for member in children.values()] == [0, 0, 0]
        assert children["top/b"].about == "it is b"
        assert status.uptime_s == 5
        task.cancel()
    assert states(status) == {"top": "stopped", "top/a": "stopped", "top/b": "stopped"}


async def test_the_status_counts_the_restarts_of_a_group_and_has_the_error_of_the_failed_child(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    lives = iter([1, 1000])
    why = "x" * (2 * ERROR_LENGTH_MAX)

    async def dies(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await trio.sleep(next(lives))
        raise EngineDied(why)

    pair = Tree(
        name="pair", strategy=Strategy.ONE_FOR_ALL, children=(child("a", dies), child("b")), backoff=Backoff(min_s=0.1)
    )
    tree = Tree(name="top", children=(pair, child("c")))
    status = TreeStatus(tree)
    nursery.start_soon(lambda: supervise(tree, rng=random.Random(0), on_event=status.on_event))
    await trio.sleep(10)
    children = {member.path: member for member in status.members()}
    assert {path: (member.state, member.restarts) for path, member in children.items()} == {
        "top": ("up", 0),
        "top/pair": ("up", 0),
        "top/pair/a": ("up", 1),
        "top/pair/b": ("up", 1),
        "top/c": ("up", 0),
    }
    assert children["top/pair/a"].last_error == why[:ERROR_LENGTH_MAX]
    assert children["top/pair/b"].last_error == ""
    assert children["top/pair/a"].since_s == 9


async def test_the_state_of_a_tree_is_that_of_a_child_in_its_back_off(autojump_clock: MockClock) -> None:
    lives = iter([True, False, True])

    async def lame(*, task_status: trio.TaskStatus[None]) -> None:
        if not next(lives):
            raise EngineDied("no")
        task_status.started()
        await trio.sleep(1)

    tree = Tree(name="top", children=(child("a"), child("b", lame)), backoff=Backoff(min_s=8, jitter=0))
    status = TreeStatus(tree)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: supervise(tree, rng=random.Random(0), on_event=status.on_event))
        await trio.sleep(3)
        await wait_all_tasks_blocked()
        assert states(status) == {"top": "starts again", "top/a": "up", "top/b": "starts again"}
        assert [member.last_error for member in status.members()] == ["", "", "no"]
        nursery.cancel_scope.cancel()
