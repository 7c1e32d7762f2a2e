"""Of the drains and restarts of a node the last one counts, and a restart that cannot succeed drains nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from protocol.errors import NotReady, StartFailed
from supervisor.node.node import Node


class Launched:
    """A node whose drains and decisions are recorded; `check` is what it does before a restart."""

    def __init__(
        self, check: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint, *, launched: bool = True
    ) -> None:
        self.decisions = list[bool]()
        directory = SimpleNamespace(name="front", draining=False, drain=lambda: None)
        assembly = cast("Any", SimpleNamespace(directory=directory))  # nothing else is used
        self.node = Node(assembly, assembly, assembly, assembly, 1.0)
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
