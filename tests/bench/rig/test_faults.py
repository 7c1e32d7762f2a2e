"""The plan of faults of a seed, the ends of nodes that count as bad, and the counts of both benches."""

from __future__ import annotations

import signal
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.chaos import table
from bench.rig.checked_clients import CheckedRequest, GatewayInterruptions
from bench.rig.cluster import FRONT, Cluster, cluster_engine_name
from bench.rig.faults import DOWN_S, ENGINES, FAULT_DURATION_S, NODES, FaultInjector, PlannedFault, plan_faults
from bench.rig.processes import ProcessEntry
from bench.rolling import Load

ASK = CheckedRequest("stream", "Tell me about the oak", None)
GOES_ON, NEVER_GOES_ON = 2, 1  # seeds of one harm
UP = f'{{"child": "{cluster_engine_name("w1")}", "child_event": "started"}}'


# The plan --------------------------------------------------------------------------------


def test_a_seed_always_gives_the_same_plan_and_another_a_different_one() -> None:
    assert plan_faults(3, 60.0, 1.5, NODES) == plan_faults(3, 60.0, 1.5, NODES) != plan_faults(4, 60.0, 1.5, NODES)


def test_a_longer_plan_begins_with_the_shorter_one() -> None:
    short = plan_faults(3, 60.0, 1.5, NODES)
    assert plan_faults(3, 120.0, 1.5, NODES)[: len(short)] == short


@pytest.mark.parametrize("faults", [NODES, ENGINES])
def test_a_plan_of_ten_minutes_has_every_fault_and_none_after_its_end(faults: dict[str, int]) -> None:
    plan = plan_faults(20, 600.0, 1.5, faults)
    assert {fault.kind for fault in plan} == set(faults)
    assert all(0 < fault.at_s < 600 for fault in plan)
    assert 300 < len(plan) < 500


def test_a_fault_can_hit_every_target_and_lasts_within_its_bounds() -> None:
    first, last = (PlannedFault(0.0, "kill a worker", share, share, 0) for share in (0.0, 0.999_999))
    assert (first.choose(["a", "b"]), last.choose(["a", "b"]), last.choose(["a"])) == ("a", "b", "a")
    assert first.duration_s(FAULT_DURATION_S) == FAULT_DURATION_S[0]
    assert DOWN_S[0] < last.duration_s(DOWN_S) <= DOWN_S[1]


# Those who are met -----------------------------------------------------------------------


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
        if number not in {signal.SIGSTOP, signal.SIGCONT}:
            self.process.returncode = 0 if number == signal.SIGTERM else -number

    def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        return 200, b""


class Stubs:
    """A cluster of stub nodes."""

    def __init__(self, **nodes: Stub) -> None:
        self.nodes = {FRONT: Stub()} | nodes
        self.workers = list(nodes)
        self.plan = SimpleNamespace(drain_s=0.0)
        self.started: list[str] = []

    @property
    def front(self) -> Stub:
        return self.nodes[FRONT]

    def start(self, name: str) -> None:
        self.started.append(name)
        self.nodes[name] = Stub(self.nodes[name].output())


def done_to(target: Stubs, *faults: str, number: int = GOES_ON) -> FaultInjector:
    """Carry out these faults one right after the other, and return the injector."""
    chaos = FaultInjector(cast("Cluster", target), {})
    chaos.run([PlannedFault(0.0, fault, 0.0, 0.0, number) for fault in faults], 0.1)
    return chaos


@pytest.mark.realtime
def test_a_node_that_ends_by_itself_is_bad_and_is_started_again() -> None:
    target = Stubs(w1=Stub(UP, code=1))
    chaos = done_to(target)
    assert [each.partition("\n")[0] for each in chaos.bad] == ["node w1 ended by itself, by 1"]
    assert target.started == ["w1"]


@pytest.mark.realtime
@pytest.mark.parametrize(("fault", "sent"), [("kill a worker", signal.SIGKILL), ("SIGTERM a worker", signal.SIGTERM)])
def test_a_node_that_a_fault_ended_is_started_again_and_is_not_bad(fault: str, sent: signal.Signals) -> None:
    node = Stub(UP)
    target = Stubs(w1=node)
    chaos = done_to(target, fault)
    assert (chaos.bad, target.started, node.sent) == ([], ["w1"], [sent])
    assert chaos.done == Counter({fault: 1, "started again": 1})


@pytest.mark.realtime
def test_a_node_that_got_sigterm_must_exit_with_0_and_leave_nothing() -> None:
    target = Stubs(w1=Stub(UP, left=["a folder"]))
    assert ["left" in each for each in done_to(target, "SIGTERM a worker").bad] == [True]


@pytest.mark.realtime
@pytest.mark.parametrize(("number", "then"), [(GOES_ON, signal.SIGCONT), (NEVER_GOES_ON, signal.SIGKILL)])
def test_a_stopped_node_is_continued_or_killed(number: int, then: signal.Signals) -> None:
    node = Stub(UP)
    chaos = done_to(Stubs(w1=node), "stop a worker", number=number)
    assert (chaos.bad, node.sent) == ([], [signal.SIGSTOP, then])
    assert chaos.done["killed while stopped"] == (then == signal.SIGKILL)


@pytest.mark.realtime
@pytest.mark.parametrize(("log", "bad"), [("", 0), (UP, 1)])
def test_a_node_may_end_by_itself_only_when_a_fault_hit_its_first_start(
    log: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Stub(log)
    host = ProcessEntry(1, 0, 1, "0", "S", "a host")
    monkeypatch.setattr(node, "observe", lambda: {"host": host})

    def killed(pid: int, number: int) -> None:
        assert (pid, number) == (host.pid, signal.SIGKILL)
        node.process.returncode = 1

    monkeypatch.setattr("bench.rig.faults.os.kill", killed)
    chaos = done_to(Stubs(w1=node), "kill a host")
    assert (len(chaos.bad), chaos.done["a start failed"]) == (bad, 1 - bad)


@pytest.mark.realtime
def test_interruptions_count_the_kill_of_the_front_and_its_return() -> None:
    chaos = done_to(Stubs(w1=Stub(UP)), "kill the front")
    assert (chaos.bad, chaos.interruptions.kills, chaos.interruptions.terminations) == ([], 2, 0)


# What is printed -------------------------------------------------------------------------


def test_the_table_always_has_the_rows_of_what_must_not_happen() -> None:
    tally = Load(counts=Counter({"whole": 3, "error engine_lost": 1, "CUT": 1}))
    lines = [line.strip() for line in table(tally, "no moves", Counter({"kill a worker": 2, "cut a link": 0}))]
    assert lines == [
        "5  requests; the slowest took 0.0 s",
        "3  whole",
        "1  error engine_lost",
        "0  wrong",
        "1  truncated without an error",
        "0  without an end",
        "no moves",
        "faults: kill a worker 2",
    ]


def test_a_request_that_is_refused_while_the_front_is_away_has_not_failed() -> None:
    load = Load()
    for how in ("whole", "refused draining", "error engine_lost"):
        load.note(ASK, how, None, 1.0)
    load.interruptions = GatewayInterruptions(terminations=1)
    for how in ("whole", "refused not_ready", "error draining", "CUT"):
        load.note(ASK, how, None, 1.0)
    assert (load.requests, load.refused, load.failed, load.spoilt) == (7, 1, 3, 1)
