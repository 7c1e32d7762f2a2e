"""The metrics of links, calls, resumes and aborts."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.decode import decode
from actors.engines.slots import slots
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.slots import SlotObserver
from actors.routing.ports import RoutingObserver
from protocol.errors import LinkLost
from protocol.messages.engine import EngineLoad
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.engines.work import request_inbox
from supervisor.observers import RoutingMetrics, SlotMetrics
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL, engine
from tests.rig.fake_engine import Costs, FakeEngine, generate
from tests.rig.router import Fake, Play, routed


def cluster(folder: Path, metrics: str = "127.0.0.1:0") -> Cluster:
    file = folder / "cluster.toml"
    file.write_text(f"""
[node.front]
[node.back]
listen = "127.0.0.1:1"
metrics = "{metrics}"
[gateway]
node = "front"
{MODEL}{engine("tiny-0", "back")}""")
    return read_cluster(file)


def lines(metrics: Metrics, name: str) -> dict[str, float]:
    """Return the series of a name, with their values."""
    found = (line.rpartition(" ") for line in metrics.render({}).decode().splitlines() if line.startswith(name))
    return {series: float(value) for series, _, value in found}


# Numbers ----------------------------------------------------------------------------------


class Slots(SlotObserver):
    """Remembers how long slots were kept."""

    def __init__(self) -> None:
        self.aborts: list[float] = []

    def aborted(self, seconds: float) -> None:
        self.aborts.append(seconds)


async def test_the_time_of_an_abort_is_from_the_cancellation_to_the_release_of_the_slot(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    observer = Slots()
    engine = FakeEngine(Costs())
    address, inbox = request_inbox(2)
    nursery.start_soon(engine.run)
    await nursery.start(decode, inbox, [slots.Slots(engine, 2, Deadlines(), observer)])
    with trio.move_on_after(2.5):
        wanted = generate(tokens_max=100)
        async with address.ask(wanted, 100) as replies:
            await replies.result()
    left_at = trio.current_time()
    await engine.wait_released(wanted.id)
    await wait_all_tasks_blocked()
    assert observer.aborts == [trio.current_time() - left_at]


def test_stuck_slots_are_counted_until_the_engine_releases_them() -> None:
    metrics = Metrics()
    observer = SlotMetrics(metrics, "main/tiny-0")
    observer.stuck(2)
    assert lines(metrics, "espalier_engine_slots_stuck") == {'espalier_engine_slots_stuck{engine="main/tiny-0"}': 2.0}
    observer.stuck(0)
    assert lines(metrics, "espalier_engine_slots_stuck") == {'espalier_engine_slots_stuck{engine="main/tiny-0"}': 0.0}


async def test_an_answer_that_ends_and_an_actor_that_is_stopped_are_not_counted_as_aborts(
    autojump_clock: MockClock,
) -> None:
    observer = Slots()
    engine = FakeEngine(Costs())
    address, inbox = request_inbox(2)
    actor = trio.CancelScope()

    async def life(*, task_status: trio.TaskStatus[None]) -> None:
        with actor:
            await decode(inbox, [slots.Slots(engine, 2, Deadlines(), observer)], task_status=task_status)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await nursery.start(life)
        async with address.ask(generate(tokens_max=3), 3) as replies:
            await replies.result()
        async with address.ask(generate("b", tokens_max=9), 9) as replies:
            await trio.sleep(2)
            actor.cancel()
            await replies.over.wait()
        nursery.cancel_scope.cancel()
    assert observer.aborts == []


def test_a_router_counts_how_calls_end_and_why_requests_were_resumed() -> None:
    metrics = Metrics()
    watch = RoutingMetrics(metrics, "tiny")
    watch.call_ended("back/tiny-0", "hand_off_failed")
    watch.call_ended("back/tiny-0", "ended")
    watch.call_resumed("hand_off_failed", 0)
    watch.call_resumed("engine_lost", 7)
    assert lines(metrics, "espalier_worker_calls_total") == {
        'espalier_worker_calls_total{model="tiny",outcome="hand_off_failed",worker="back/tiny-0"}': 1.0,
        'espalier_worker_calls_total{model="tiny",outcome="ended",worker="back/tiny-0"}': 1.0,
    }
    assert lines(metrics, "espalier_resumes_total") == {
        'espalier_resumes_total{code="hand_off_failed",kind="retried",model="tiny"}': 1.0,
        'espalier_resumes_total{code="engine_lost",kind="resumed",model="tiny"}': 1.0,
    }


def test_a_second_definition_of_a_metric_is_an_error() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="the metric espalier_requests is defined twice"):
        metrics.registry.counter("espalier_requests", "Something else", "model")


async def test_each_metric_of_a_node_is_in_its_text_once(tmp_path: Path) -> None:
    for node in ("front", "back"):
        _, metrics = built_assembly(cluster(tmp_path), node)
        lines = metrics.render({"back/tiny-0": EngineLoad(1, 0, 2)}).decode().splitlines()
        names = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
        assert sorted(set(names)) == sorted(names)
        assert {"espalier_engine_up", "espalier_engine_running", "espalier_link_up"} <= set(names)


async def test_the_counts_of_a_link_remain_after_it_is_lost(tmp_path: Path) -> None:
    assembly, metrics = built_assembly(cluster(tmp_path), "front")
    assert assembly.links is not None
    assembly.links.traffic["back"].received(40)
    assert lines(metrics, 'espalier_link_up{peer="back"}') == {'espalier_link_up{peer="back"}': 0.0}
    assembly.links.traffic["back"].received(2)
    received = lines(metrics, 'espalier_link_bytes_total{direction="received",peer="back"}')
    assert list(received.values()) == [42.0]
    assert list(lines(metrics, 'espalier_link_messages_total{direction="received"').values()) == [2.0]


async def test_a_resumed_request_is_counted_once_and_each_call_by_its_outcome(autojump_clock: MockClock) -> None:
    observed: list[tuple[str, object]] = []

    class Hears(RoutingObserver):
        def call_ended(self, worker: str, outcome: str) -> None:
            observed.append((worker, outcome))

        def call_resumed(self, code: str, sent: int) -> None:
            observed.append((code, sent))

    bad, good = Fake("bad", [Play(LinkLost("gone"), tokens=2)]), Fake("good", more=1)
    async with routed(bad, good) as router:
        router.routing.observer = Hears()
        async with router.address.ask(generate(tokens_max=4), 4) as replies:
            await replies.result()
        with trio.move_on_after(1.5):
            async with router.address.ask(generate("b", tokens_max=4), 4) as replies:
                await replies.result()
        await wait_all_tasks_blocked()
    assert observed[:3] == [("bad", "link_lost"), ("link_lost", 2), ("good", "ended")]
    assert [outcome for _, outcome in observed[3:]] == ["left"]
