"""A node whose event loop is blocked is killed and restarted, and `status` shows the reason."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from actors.kit.groups import first_leaf
from protocol.errors import StartFailed
from supervisor.engines.kinds import load_cluster
from supervisor.launcher import node_process
from supervisor.launcher.kept_node import KeptNode, NodeKeeper
from supervisor.launcher.launcher import Launcher
from supervisor.launcher.node_process import NodeDied
from supervisor.launcher.parent_pipe import HEARTBEAT, LineReader
from supervisor.processes import process
from supervisor.telemetry.logs import Terminal
from tests.rig.launched import SIMULATED
from tests.rig.log_records import log_records

TINY = Path(__file__).parents[3] / "examples" / "tiny"
HUNG_S = 30.0
HANGS = """
import faulthandler, signal, sys, time
from supervisor.launcher.parent_pipe import ParentPipe
pipe = ParentPipe(int(sys.argv[sys.argv.index("--launched") + 1]))
faulthandler.register(signal.SIGQUIT, file=pipe.fd)
def stuck_in_here():
    time.sleep(60)
pipe.send("up")
pipe.heartbeat()
stuck_in_here()
"""


class Process(process.Process):
    """A process that records the signals that it gets, and when."""

    def __init__(self) -> None:
        self.signals: list[tuple[signal.Signals, str, float]] = []

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append((number, "it", trio.current_time()))

    def signal_group(self, number: signal.Signals) -> None:
        self.signals.append((number, "its group", trio.current_time()))


@pytest.fixture
def one(tmp_path: Path) -> Launcher:
    """A launcher of three nodes that does not run."""
    file = tmp_path / "cluster.toml"
    file.write_text(SIMULATED.format(ports=(7400, 7401, 7402), tiny=TINY))
    names, terminal = ("front", "one", "two"), Terminal(io.StringIO(), live=True)
    return Launcher(load_cluster(file), names, ("false",), dict(os.environ), terminal, random.Random(0))


async def test_a_node_that_is_silent_for_too_long_writes_its_stacks_and_is_killed(
    one: Launcher, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    life, watched, began, node = node_process.ProcessLife(), Process(), trio.current_time(), _node(HUNG_S)
    sender, receiver = trio.testing.memory_stream_one_way_pair()
    async with sender, trio.open_nursery() as nursery:
        nursery.start_soon(node_process.receive_all, node, one, life, LineReader(receiver), lambda: None)
        nursery.start_soon(node_process.watch, node, watched, life, trio.CancelScope())
        for _ in range(100):
            await sender.send_all(HEARTBEAT)
            await trio.sleep(1.0)
        assert not watched.signals
        last = trio.current_time() - began
        await trio.sleep(2 * HUNG_S)
        nursery.cancel_scope.cancel()
    (asked, whom, asked_at), (killed, group, killed_at) = watched.signals
    assert (asked, whom, killed, group) == (signal.SIGQUIT, "it", signal.SIGKILL, "its group")
    assert HUNG_S - 1.0 <= asked_at - began - last <= HUNG_S + 1.0
    assert killed_at - asked_at == pytest.approx(node_process.STACK_S)
    assert (life.hung, life.reason) == (True, "its event loop did not turn for 30 s")
    assert "node two hangs, and is ended" in caplog.messages


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("up", [False, True])
async def test_a_node_that_was_asked_to_restart_ends_so_that_it_is_started_again(
    one: Launcher, up: bool, removed: bool, autojump_clock: MockClock
) -> None:
    life, node = node_process.ProcessLife(), _node(HUNG_S)
    node.removed = removed
    sender, receiver = trio.testing.memory_stream_one_way_pair()
    lines = [*(['["up", ""]'] if up else []), '["restart", ""]', '["done", ""]']
    await sender.send_all("".join(f"{line}\n" for line in lines).encode())
    await sender.aclose()
    await node_process.receive_all(node, one, life, LineReader(receiver), lambda: None)
    if not removed:
        assert (life.done, life.reason) == (False, node_process.RESTARTED)
    else:  # it is not in the file any more
        assert life.done


@pytest.mark.parametrize(("kinds", "stays"), [(("restart", "stay"), True), (("stay", "restart"), False)])
async def test_the_last_decision_of_an_operator_counts(
    one: Launcher, kinds: tuple[str, ...], stays: bool, autojump_clock: MockClock
) -> None:
    life = node_process.ProcessLife()
    sender, receiver = trio.testing.memory_stream_one_way_pair()
    await sender.send_all("".join(f'["{kind}", ""]\n' for kind in ("up", *kinds, "done")).encode())
    await sender.aclose()
    await node_process.receive_all(_node(HUNG_S), one, life, LineReader(receiver), lambda: None)
    assert life.done == stays


async def test_a_node_that_has_not_sent_a_heartbeat_yet_is_not_hung(autojump_clock: MockClock) -> None:
    life, watched, scope = node_process.ProcessLife(), Process(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node_process.watch, _node(HUNG_S), watched, life, scope)
        await trio.sleep(1000)
        scope.cancel()
    assert not watched.signals


async def test_a_launcher_that_was_stopped_itself_kills_no_node() -> None:
    clock = MockClock()  # time passes when the test says so, as when a whole host is suspended

    async def scene() -> None:
        life, watched, scope = node_process.ProcessLife(has_beaten=True), Process(), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node_process.watch, _node(HUNG_S), watched, life, scope)
            for _ in range(20):
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(1000.0)
            scope.cancel()
        assert not watched.signals

    await trio.to_thread.run_sync(lambda: trio.run(scene, clock=clock))


@pytest.mark.realtime
async def test_a_node_that_hangs_is_killed_and_the_log_has_its_stacks(
    one: Launcher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_process, "STACK_S", 4.0)  # a busy machine may let the process stand still
    one.command = (sys.executable, "-c", HANGS)
    node = _node(0.5)
    with trio.fail_after(90), pytest.raises(NodeDied, match="node two ended: its event loop did not turn"):
        await _run_alone(node, one)
    (record,) = [each for each in log_records(caplog) if each.message == "where node two hung"]
    assert any("in stuck_in_here" in line for line in record.stack)
    assert node.arguments() == ("--restarts", "1", "--ended-by=its event loop did not turn for 0.5 s")
    assert node.process is None


@pytest.mark.realtime
@pytest.mark.nightly
async def test_a_node_that_hangs_while_it_is_stopped_is_killed_long_before_its_drain_is_over(
    one: Launcher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_process, "STACK_S", 4.0)  # a busy machine may let the process stand still
    one.command = (sys.executable, "-c", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HANGS}")
    node = KeptNode("two", process.Ladder(term_s=1000.0), 0.5)
    with trio.fail_after(90):
        async with trio.open_nursery() as nursery:
            await nursery.start(node_process.run, node, one, 60.0)
            nursery.cancel_scope.cancel()
    assert "node two hangs, and is ended" in caplog.messages
    (record,) = [each for each in log_records(caplog) if each.message == "where node two hung"]
    assert any("in stuck_in_here" in line for line in record.stack)
    assert node.process is None


async def test_a_node_that_is_stopped_still_has_to_send_heartbeats_and_decides_nothing_more(
    autojump_clock: MockClock,
) -> None:
    life, watched = node_process.ProcessLife(), Process()
    sender, receiver = trio.testing.memory_stream_one_way_pair()
    async with sender, trio.open_nursery() as nursery:
        nursery.start_soon(node_process.receive_heartbeats, life, LineReader(receiver), trio.CancelScope())
        nursery.start_soon(node_process.watch, _node(HUNG_S), watched, life, trio.CancelScope())
        await sender.send_all(b'["restart", ""]\n')
        for _ in range(100):
            await sender.send_all(HEARTBEAT)
            await trio.sleep(1.0)
        assert not watched.signals
        assert not life.restarts
        await trio.sleep(2 * HUNG_S)
        nursery.cancel_scope.cancel()
    assert [number for number, *_ in watched.signals] == [signal.SIGQUIT, signal.SIGKILL]


async def test_a_node_that_dies_while_an_operator_drains_it_stays_down(
    one: Launcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decided = "stay"

    async def run_once(
        node: KeptNode, keeper: NodeKeeper, life: node_process.ProcessLife, on_up: Callable[[], None]
    ) -> None:
        sender, receiver = trio.testing.memory_stream_one_way_pair()
        await sender.send_all(f'["up", ""]\n["{decided}", ""]\n'.encode())
        await sender.aclose()
        await node_process.receive_all(node, keeper, life, LineReader(receiver), on_up)

    monkeypatch.setattr(node_process, "_run_once", run_once)
    await _run_alone(_node(HUNG_S), one)
    assert "node two has ended while it drained, and is not started again" in caplog.messages
    decided = "restart"
    with pytest.raises(NodeDied):
        await _run_alone(_node(HUNG_S), one)


@pytest.mark.realtime
async def test_a_node_that_is_killed_ended_by_that_signal(one: Launcher) -> None:
    one.command = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    node = _node(HUNG_S)
    with (
        trio.fail_after(90),
        pytest.raises(StartFailed, match=r"^node two did not start: it was killed by SIGKILL, as"),
    ):
        await _run_alone(node, one)
    assert node.last_failure.startswith("it was killed by SIGKILL")


@pytest.mark.realtime
async def test_a_node_that_is_not_up_in_time_did_not_start(one: Launcher) -> None:
    one.command = (sys.executable, "-c", "import time; time.sleep(60)")
    node = KeptNode("two", process.Ladder(term_s=0.1), 30.0)
    with trio.fail_after(90), pytest.raises(StartFailed, match=r"did not start: it was not up within 0\.3 s"):
        await _run_alone(node, one, start_s=0.3)
    assert node.process is None


def _node(watchdog_s: float) -> KeptNode:
    return KeptNode("two", process.Ladder(), watchdog_s)


async def _run_alone(node: KeptNode, keeper: Launcher, start_s: float = 60.0) -> None:
    """Run a node until it ends, and raise the only exception of the group that this raises."""
    try:
        await node_process.run(node, keeper, start_s)
    except ExceptionGroup as group:
        raise first_leaf(group) from None
