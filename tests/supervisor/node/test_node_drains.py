"""A drain has its order; of drains and restarts of a node the last counts, and one that cannot succeed drains nothing."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import NotReady, StartFailed
from supervisor.node.node import BYE_S, HARD_EXIT_S, Node
from supervisor.processes import reaper, run_folder
from supervisor.processes.process import GracePeriods

ANNOUNCE_S, DRAIN_S = 0.5, 10.0


class Launched:
    """A node whose drains and decisions are recorded; `check` is what it does before a restart."""

    def __init__(
        self, check: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint, *, launched: bool = True
    ) -> None:
        self.decisions = list[bool]()
        directory = SimpleNamespace(name="front", draining=False, drain=lambda: None)
        assembly = cast("Any", SimpleNamespace(directory=directory))  # nothing else is used
        self.node = Node(assembly, assembly, assembly, assembly, lambda: 1.0)
        self.node._reloader = cast("Any", SimpleNamespace(check_start=check))  # noqa: SLF001  # stands for a file
        if launched:
            self.node.ask_launcher_to_restart = self.decisions.append


async def test_the_launcher_hears_of_the_last_drain() -> None:
    front = Launched()
    await front.node.drain_for_operator(True)
    await front.node.drain_for_operator(False)
    assert front.decisions == [True, False]
    await front.node.drain_for_operator(True)
    front.node.on_stop("SIGTERM")
    assert front.decisions == [True, False, True, False], "SIGTERM leaves it down, too"


async def test_a_second_signal_leaves_it_down_even_if_its_tree_does_not_end(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, order = Launched(), list[object]()
    front.node.on_ended = lambda: order.append("done")
    front.node.terminal = cast("Any", SimpleNamespace(flush=lambda _: order.append("log")))
    grace = SimpleNamespace(shorten=lambda: order.append("shortened"))
    folder = SimpleNamespace(path="none")
    front.node.runtime = cast("Any", SimpleNamespace(grace=grace, folder=folder))
    monkeypatch.setattr(reaper, "kill_all", lambda: 0)
    monkeypatch.setattr(run_folder, "remove", lambda *_: None)
    monkeypatch.setattr(os, "_exit", order.append)
    front.node.on_stop("SIGTERM")
    async with trio.open_nursery() as front.node.nursery:
        assert not front.node.on_stop("SIGTERM")
        front.node.on_second_signal(15)
    assert trio.current_time() == HARD_EXIT_S
    assert (front.decisions, order) == ([False], ["shortened", "done", "log", 143])


async def test_a_restart_that_cannot_succeed_drains_nothing() -> None:
    async def wrong() -> None:
        await trio.lowlevel.checkpoint()
        raise StartFailed("the file has 1 mistake")

    for front, message in (
        (Launched(wrong), "runs on, since it could not .* 1 mistake"),
        (Launched(launched=False), "no launcher"),
    ):
        with pytest.raises(NotReady, match=message):
            await front.node.drain_for_operator(True)
        assert front.decisions == []


async def test_a_drain_while_a_restart_is_checked_leaves_the_node_down() -> None:
    async def meanwhile() -> None:
        await front.node.drain_for_operator(False)

    front = Launched(meanwhile)
    with pytest.raises(NotReady, match="is to stay down"):
        await front.node.drain_for_operator(True)
    assert front.decisions == [False]


@pytest.mark.parametrize(("busy_s", "bye_at"), [(0.0, ANNOUNCE_S), (3.0, ANNOUNCE_S + 3.0), (99.0, DRAIN_S)])
async def test_a_node_tells_others_that_it_drains_and_leaves_with_a_word_once_it_is_idle(
    busy_s: float, bye_at: float, autojump_clock: MockClock
) -> None:
    order = list[tuple[str, float]]()

    def note(what: str) -> None:
        order.append((what, trio.current_time()))

    async def wait_idle() -> None:
        note("waits for its workers")
        await trio.sleep(busy_s)

    directory: Any = SimpleNamespace(name="back", draining=False, running=0, wait_idle=wait_idle)
    directory.drain = lambda: note("announces")
    links = SimpleNamespace(section=SimpleNamespace(announce_s=ANNOUNCE_S), send_bye=note)
    assembly: Any = SimpleNamespace(directory=directory, gateway=None, links=links)
    runtime: Any = SimpleNamespace(grace=GracePeriods())
    unused: Any = None
    async with trio.open_nursery() as nursery:
        node = Node(unused, assembly, runtime, unused, lambda: DRAIN_S, nursery=nursery)
        with node._tree:  # noqa: SLF001  # what the end of the drain cancels
            node.drain("the test drains")
            await trio.sleep_forever()
        note("ends")
    assert order == [
        ("announces", 0.0),
        ("waits for its workers", ANNOUNCE_S),
        ("node back shuts down", bye_at),
        ("ends", bye_at + BYE_S),
    ]
