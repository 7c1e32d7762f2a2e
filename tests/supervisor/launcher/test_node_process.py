"""A node whose event loop turns no more is ended and made anew, and whoever asks is told why."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from actors.kit.groups import first_leaf
from supervisor.engines.kinds import read_cluster
from supervisor.launcher import node_process
from supervisor.launcher.launcher import Launcher
from supervisor.launcher.node_process import NodeDied
from supervisor.processes import process
from supervisor.supervision.status import EarlierFailures, TreeStatus
from supervisor.supervision.tree import Child, Tree
from supervisor.telemetry.logs import Terminal
from tests.rig.launched import SIMULATED

TINY = Path(__file__).parents[3] / "examples" / "tiny"
HUNG_S = 30.0
SAYS = """
import faulthandler, signal, sys, time
from supervisor.launcher.parent_pipe import ParentPipe
upward = ParentPipe(int(sys.argv[sys.argv.index("--launched") + 1]))
faulthandler.register(signal.SIGQUIT, file=upward.fd)
def stuck_in_here():
    time.sleep(60)
upward.say("up")
upward.pulse()
stuck_in_here()
"""


class Process:
    """One that hears signals, and notes when."""

    def __init__(self):
        self.heard = []

    def send_signal(self, number):
        self.heard.append((number, "it", trio.current_time()))

    def signal_group(self, number):
        self.heard.append((number, "its group", trio.current_time()))


@pytest.fixture
def one(tmp_path):
    """A launcher of three nodes that has not run yet."""
    file = tmp_path / "cluster.toml"
    file.write_text(SIMULATED.format(ports=(7400, 7401, 7402), tiny=TINY))
    names, terminal = ("front", "one", "two"), Terminal(io.StringIO(), live=True)
    return Launcher(read_cluster(file), names, ("false",), dict(os.environ), terminal, random.Random(0))


async def test_d8_a_node_that_is_silent_for_too_long_says_where_it_is_and_is_killed(autojump_clock, caplog):
    life, watched, began = node_process._Life(pulsed=True), Process(), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node_process._watch, "one", HUNG_S, watched, life, trio.CancelScope())
        for _ in range(100):
            await trio.sleep(1.0)
            life.silent_s = 0.0  # it has said something
        assert not watched.heard
        last = trio.current_time() - began
    (asked, whom, asked_at), (killed, group, killed_at) = watched.heard
    assert (asked, whom, killed, group) == (signal.SIGQUIT, "it", signal.SIGKILL, "its group")
    assert HUNG_S - 1.0 <= asked_at - began - last <= HUNG_S + 1.0
    assert killed_at - asked_at == pytest.approx(node_process.STACK_S)
    assert (life.hung, life.why) == (True, "its event loop did not turn for 30 s")
    assert "node one hangs, and is ended" in caplog.messages


async def test_a_node_that_has_not_begun_to_turn_is_not_hung(autojump_clock):
    life, watched, scope = node_process._Life(), Process(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node_process._watch, "one", HUNG_S, watched, life, scope)
        await trio.sleep(1000)
        scope.cancel()
    assert not watched.heard


async def test_a_launcher_that_was_stopped_itself_ends_no_node():
    clock = trio.testing.MockClock()  # time passes when the test says so, as when a whole host is suspended

    async def scene():
        life, watched, scope = node_process._Life(pulsed=True), Process(), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node_process._watch, "one", HUNG_S, watched, life, scope)
            for _ in range(20):
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(1000.0)
            scope.cancel()
        assert not watched.heard

    await trio.to_thread.run_sync(lambda: trio.run(scene, clock=clock))


@pytest.mark.realtime
async def test_d8_a_node_that_hangs_is_ended_and_the_log_says_where(one, caplog):
    one.command = (sys.executable, "-c", SAYS)
    one._ladders["two"], one._hung_s["two"] = process.Ladder(), 0.5
    with trio.fail_after(20), pytest.raises(NodeDied, match="node two ended: its event loop did not turn"):
        await _alone(one)
    (record,) = [each for each in caplog.records if each.message == "where node two hung"]
    assert any("in stuck_in_here" in line for line in record.stack)
    assert one.earlier("two") == ("--restarts", "1", "--ended-by", "its event loop did not turn for 0.5 s")
    assert one.processes == {}


@pytest.mark.realtime
async def test_d8_a_node_that_hangs_before_it_is_up_is_started_again(one, tmp_path):
    again = f"""
from pathlib import Path
from supervisor.launcher.parent_pipe import ParentPipe
mark = Path({str(tmp_path / "was here")!r})
upward = ParentPipe(int(sys.argv[sys.argv.index("--launched") + 1]))
upward.pulse()
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
upward.say("up")
upward.say("done")
"""
    one.command = (sys.executable, "-c", f"import os, signal, sys\n{again}")
    one._ladders["two"], one._hung_s["two"] = process.Ladder(), 0.5
    with trio.fail_after(20):
        await _alone(one)
    assert one._earlier["two"] == (1, "its event loop did not turn for 0.5 s")


async def _alone(one):
    """Keep a node until it ends, and raise what that raises, alone."""
    try:
        await node_process.run("two", one)
    except ExceptionGroup as group:
        raise first_leaf(group) from None


async def test_d8_whoever_asks_a_node_how_it_is_hears_why_it_was_started_again():
    async def nothing(*, task_status):
        task_status.started()

    tree = Tree(name="one", children=(Child(name="a", run=nothing),))
    root, _ = TreeStatus(tree, EarlierFailures(2, "its event loop did not turn for 30 s")).members()
    assert (root.restarts, root.last_error) == (2, "its event loop did not turn for 30 s")
