"""What an operator's commands print is what was said, and a node that lies is no reason to believe it."""

from __future__ import annotations

from io import StringIO
from math import inf, nan

import pytest
import trio
from rich.console import Console

from protocol.cluster import ChildState, Leg, LinkState, NodeState, Offer, Reload, Reloaded, Status
from protocol.errors import NotReady, PeerViolation
from supervisor import operate
from supervisor.operate import STARTS_S


def status(name, *, run="r", up_s=1.0, since_s=1.0, silent_s=0.1, offers=()):
    tree = (ChildState(name, "up", 0, since_s),)
    return Status(name, run, "1", up_s, NodeState(offers), tree, (LinkState("x", True, silent_s),))


class Cluster:
    """Stands for an operator's way to a cluster; `at` says from when on a node answers, and how."""

    def __init__(self, at, answers=None):
        self.at, self.answers, self.asked = at, answers or {}, []

    async def look(self):
        await trio.lowlevel.checkpoint()
        now = trio.current_time()
        return {name: status(name) if since <= now else "nobody listens" for name, since in self.at.items()}

    async def ask(self, name, request):
        await trio.lowlevel.checkpoint()
        self.asked.append(request)
        answer = self.answers.get(name, Reloaded())
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def console():
    return Console(file=StringIO(), width=80, color_system=None)


def printed(console):
    return console.file.getvalue().splitlines()


async def test_a_reload_waits_until_a_node_that_a_launcher_starts_answers(console, autojump_clock):
    began = trio.current_time()
    cluster = Cluster({"one": 0, "two": began + 3}, {"one": Reloaded(("node two is known now",), (), ("two",))})
    assert await operate._reload(cluster, console) == 0
    assert printed(console) == ["one:", "  node two is known now", "two: it runs now"]
    assert cluster.asked == [Reload("one")]
    assert 3 <= trio.current_time() - began < 4


async def test_a_reload_waits_for_no_other_and_not_for_ever(console, autojump_clock):
    began = trio.current_time()
    assert await operate._reload(Cluster({"one": 0, "two": inf}), console) == 1
    assert trio.current_time() == began
    starts = Cluster({"one": 0, "two": inf}, {"one": Reloaded((), (), ("two", "nobody"))})
    assert await operate._reload(starts, console) == 1
    assert STARTS_S <= trio.current_time() - began < STARTS_S + 1
    assert printed(console) == ["one: nothing has changed", "two: not asked: nobody listens"] * 2


async def test_a_node_that_refuses_to_reload_is_named_with_its_reason_and_the_others_are_asked(console):
    cluster = Cluster({"one": 0, "two": 0}, {"one": NotReady("[red]no[/]\x1b[2J")})
    assert await operate._reload(cluster, console) == 1
    assert printed(console) == ["one: [red]no[/]\\x1b[2J", "two: nothing has changed"]


async def test_a_node_that_cannot_be_asked_to_drain_is_named_with_its_reason_as_it_was_said(console):
    class Away(Cluster):
        async def look(self):
            await trio.lowlevel.checkpoint()
            return {"one": "[bold]\x1b]0;title\x07[/]"}

    assert await operate._drain(Away({}), console, "one") == 1
    assert printed(console)[0].startswith("Node one cannot be asked: [bold]\\x1b]0;title\\x07[/]. If it runs,")
    assert await operate._drain(Away({}), console, "[red]two") == 1
    assert printed(console)[1] == "There is no node [red]two; there is one."


@pytest.mark.parametrize("lie", [{"up_s": nan}, {"since_s": inf}, {"silent_s": nan}])
def test_times_that_cannot_be_are_not_believed(lie):
    assert operate._checked(status("one")) == status("one")
    with pytest.raises(PeerViolation, match="times that cannot be"):
        operate._checked(status("one", **lie))


def test_engines_that_cannot_be_are_not_believed():
    with pytest.raises(PeerViolation):
        operate._checked(status("one", offers=(Offer("a", "m", Leg.BOTH, 4, True, None, 0, 0, 0, nan),)))
