"""The ends of nodes that count as bad, the sequences of faults of a seed, and requests while a front is away."""

from __future__ import annotations

import signal
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.faults.injector import FaultInjector
from bench.faults.rolling import Load
from bench.rig.checked_clients import CheckedRequest, GatewayInterruptions
from bench.rig.cluster import FRONT, Cluster, cluster_engine_name
from bench.rig.processes import ProcessEntry

ASK = CheckedRequest("stream", "Tell me about the oak", None)
UP = f'{{"child": "{cluster_engine_name("w1")}", "child_event": "started"}}'
WITHIN_S = 30.0


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a dead node again at once."""
    monkeypatch.setattr("bench.faults.injector.DOWN_S", (0.0, 0.01))


class Stub:
    """A node with a given log and exit code, which records its signals."""

    def __init__(self, log: str = "", code: int | None = None, left: tuple[()] | list[Any] = ()) -> None:
        self.log, self.left_behind, self.sent = log, list(left), list[int]()
        self.process = SimpleNamespace(poll=lambda: self.process.returncode, returncode=code)  # type: ignore[has-type]

    def output(self) -> str:
        return self.log

    def observe(self) -> dict[Any, Any]:
        return {}

    def living(self) -> list[Any]:
        return []

    def leftovers(self) -> list[Any]:
        return self.left_behind

    def signal(self, number: int) -> None:
        self.sent.append(number)
        self.process.returncode = 0 if number == signal.SIGTERM else -number

    def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        return 200, b""


class Stubs:
    """A cluster of stub nodes."""

    def __init__(self, **nodes: Stub) -> None:
        self.nodes = {FRONT: Stub(UP)} | nodes
        self.workers = list(nodes)
        self.plan = SimpleNamespace(drain_s=0.0)
        self.started: list[str] = []

    @property
    def front(self) -> Stub:
        return self.nodes[FRONT]

    def start(self, name: str) -> None:
        self.started.append(name)
        self.nodes[name] = Stub(self.nodes[name].output())


def done_to(target: Stubs, fault: str, name: str = "w1") -> FaultInjector:
    """Carry out one fault of a node, and return the injector."""
    injector = FaultInjector(cast("Cluster", target), {})
    injector.drive([injector.node_fault(name, fault, Random(1))], WITHIN_S)
    return injector


@pytest.mark.parametrize(("fault", "sent"), [("kill", signal.SIGKILL), ("SIGTERM", signal.SIGTERM)])
def test_a_node_that_a_fault_ended_is_started_again_and_is_not_bad(fault: str, sent: signal.Signals) -> None:
    node = Stub(UP)
    target = Stubs(w1=node)
    injector = done_to(target, fault)
    assert (injector.bad, target.started, node.sent) == ([], ["w1"], [sent])
    assert injector.done == Counter({"started again": 1})


def test_a_node_that_got_sigterm_must_exit_with_0_and_leave_nothing() -> None:
    assert ["left" in each for each in done_to(Stubs(w1=Stub(UP, left=["a folder"])), "SIGTERM").bad] == [True]


def test_interruptions_count_the_kill_of_the_front_and_its_return() -> None:
    injector = done_to(Stubs(w1=Stub(UP)), "kill", FRONT)
    assert (injector.bad, injector.interruptions) == ([], GatewayInterruptions(kills=2, terminations=0))


def run(target: Stubs, faults: dict[str, dict[str, int]], seconds: float, seed: int = 1) -> FaultInjector:
    injector = FaultInjector(cast("Cluster", target), {})
    injector.run(faults, 0.01, seconds, seed)
    return injector


@pytest.mark.parametrize(("log", "bad"), [("", 0), (UP, 1)])
def test_a_node_may_end_by_itself_only_when_a_fault_hit_its_first_start(
    log: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, kills = Stub(log), list[int]()
    monkeypatch.setattr(node, "observe", lambda: {"host": ProcessEntry(1, 0, 1, "0", "S", "a host")})

    def killed(pid: int, number: int) -> None:
        kills.append(pid)
        assert number == signal.SIGKILL
        node.process.returncode = 1

    monkeypatch.setattr("bench.faults.injector.os.kill", killed)
    injector = run(Stubs(w1=node), {"host": {"kill": 1000}, "worker": {"stop": 1}}, 0.2)
    assert kills[:1] == [1]
    assert (len(injector.bad), injector.done["a start failed"]) == (bad, 1 - bad)


def test_a_request_that_is_refused_while_the_front_is_away_has_not_failed() -> None:
    load = Load()
    for how in ("whole", "refused draining", "error engine_lost"):
        load.note(ASK, how, None, 1.0)
    load.interruptions = GatewayInterruptions(terminations=1)
    for how in ("whole", "refused not_ready", "error draining", "CUT"):
        load.note(ASK, how, None, 1.0)
    assert (load.requests, load.refused, load.failed, load.spoilt) == (7, 1, 3, 1)
