"""A command that drains the last gateway says so."""

from __future__ import annotations

from io import StringIO

import pytest
import trio
from attrs import evolve
from rich.console import Console
from trio.testing import MockClock

from protocol.messages.cluster import NodeState, Status
from supervisor.cli import drain
from supervisor.cli.status_view import StatusOrError
from tests.supervisor.cli.test_commands import Draining, printed, status


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=80, color_system=None)


class LastGateways(Draining):
    """A client of two gateway processes, the only gateways of the cluster."""

    async def poll(self) -> dict[str, StatusOrError]:
        leaving = NodeState((), draining=True)
        states = {name: evolve(self.gates[name], state=leaving) for name in self.drained_at}
        return {**self.gates, **states, "back": status("back")}

    @property
    def gates(self) -> dict[str, Status]:
        return {name: answer for name, answer in self.statuses.items() if isinstance(answer, Status)}


@pytest.mark.parametrize(("drained", "warned"), [(["front-0"], False), (["front-0", "front-1"], True)])
async def test_commands_that_drain_all_gateways_at_once_say_that_clients_are_refused(
    drained: list[str], warned: bool, console: Console, autojump_clock: MockClock
) -> None:
    cluster = LastGateways()
    async with trio.open_nursery() as nursery:
        for name in drained:  # a command of its own each
            nursery.start_soon(drain.drain_nodes, cluster, console, name)
    sentence = "No other gateway serves: clients are refused until one is up."
    assert (sentence in printed(console)) is warned
