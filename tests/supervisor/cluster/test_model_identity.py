"""A worker that has another model under the same name is never asked, and logs, status and metrics name it."""

from __future__ import annotations

import logging
from collections import Counter
from io import StringIO
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import SimulatedSpec
from protocol.errors import StartFailed
from protocol.messages.cluster import GetStatus, InFlightCounts, Leg, LoadUpdate, NodeState, Offer, Status
from protocol.messages.engine import EngineInfo, HandOff
from protocol.model_folder import WEIGHTS, digest
from supervisor.cli.status_view import render_status
from supervisor.cluster import models, readiness
from supervisor.cluster.directory import Directory
from supervisor.cluster.model_identity import ModelIdentities, ModelIdentityStatistics
from supervisor.control.control import NodeControl
from supervisor.engines.actor_runs import run_requests
from supervisor.engines.work import LocalEngine
from supervisor.node import gauges
from supervisor.supervision.registration import Registration
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.links import idle_link
from tests.rig.log_records import log_records
from tests.rig.nodes import unlink
from tests.supervisor.telemetry.test_metrics import cluster

OWN = digest({"config.json": b"{}", "tokenizer.json": b"[]"})
OTHER = digest({"config.json": b"{}", "tokenizer.json": b"[1]"})
INFO = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True, digest=OWN)
SMALL = evolve(INFO, request_tokens_max=8, digest=OTHER)
PAIR = Leg.PREFILL, Leg.DECODE
WHY = "is not asked: its model is another one: it differs in tokenizer.json"


def offer(name: str, info: EngineInfo) -> Offer:
    return Offer(name, "oak", Leg.BOTH, 4, up=True, engine=info)


@pytest.fixture
async def directory() -> Directory:
    directory = Directory("here", models=ModelIdentities({"oak": OWN}))
    directory.linked("far", idle_link())
    return directory


async def status_of(directory: Directory) -> Status:
    status = await NodeControl(directory, "run", "1", no_loads).answer(GetStatus())
    assert isinstance(status, Status)
    return status


async def no_loads() -> dict[Any, Any]:
    return {}


async def test_a_worker_of_another_model_is_never_asked_and_its_limits_count_for_nobody(
    directory: Directory,
) -> None:
    directory.merge_state("far", NodeState((offer("one", INFO), offer("two", SMALL))))
    assert [worker.load.name for worker in directory.workers("oak")] == ["far/one"]
    assert models.request_tokens_max(directory, "oak") == INFO.request_tokens_max
    assert readiness.engines_up(directory) == {"far/one": 1.0, "far/two": 0.0}
    assert readiness.unready(directory, ["oak"]) is None, "another one serves it"


async def test_readiness_names_the_worker_and_what_differs(directory: Directory) -> None:
    directory.merge_state("far", NodeState((offer("two", SMALL),)))
    assert readiness.unready(directory, ["oak"]) == readiness.never_ready(directory, ["oak"]) == f"engine two {WHY}"
    directory.merge_state("far", NodeState((offer("two", INFO),)))
    assert readiness.unready(directory, ["oak"]) is readiness.never_ready(directory, ["oak"]) is None
    assert [worker.load.name for worker in directory.workers("oak")] == ["far/two"]


@pytest.mark.parametrize(
    ("kind", "address", "why"),
    [
        ("new", b"x", "this node cannot make a hand-off of its kind, 'new'"),
        ("sglang", b"?", "the address of a prefill cannot be read"),
        ("sglang", b"\x00\x01host", None),
    ],
)
def test_a_prefill_whose_hand_off_cannot_be_made_here_is_not_asked(
    kind: str, address: bytes, why: str | None, tmp_path: Path
) -> None:
    directory = built_assembly(cluster(tmp_path), "front")[0].directory
    info = evolve(INFO, kind=kind, hand_off=HandOff.CONCURRENT, hand_off_address=address)
    offers = offer("p", info), offer("d", evolve(info, hand_off_address=None))
    directory.merge_state(
        "far", NodeState(tuple(evolve(each, leg=leg) for each, leg in zip(offers, PAIR, strict=True)))
    )
    assert directory.models.rejections == ({} if why is None else {"far/p": f"is not asked: {why}"})
    expected = None if why is None else f"engine p is not asked: {why}"
    assert readiness.unready(directory, ["oak"]) == expected


async def test_the_log_has_it_once_and_the_status_as_long_as_it_is_so(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            directory.merge_state("far", NodeState((offer("two", SMALL),)))
    [record] = log_records(caplog)
    assert (record.peer, record.engine) == ("far", "two")
    assert record.reason == "its model is another one: it differs in tokenizer.json"
    status = await status_of(directory)
    assert status.refused == (f"engine far/two {WHY}",)
    console = Console(width=200, record=True, file=StringIO())
    console.print(render_status("espalier", {"here": status}))
    assert f"node here does without an engine: engine far/two {WHY}" in console.export_text()
    unlink(directory, "far")
    assert (await status_of(directory)).refused == ()


@pytest.mark.parametrize("own", [(), (*OWN, *digest({WEIGHTS: b"some"}))])
async def test_a_worker_without_a_digest_or_with_weights_beside_is_asked(
    directory: Directory, own: tuple[tuple[str, str], ...]
) -> None:
    directory.merge_state("far", NodeState((offer("one", evolve(INFO, digest=own)),)))
    assert len(directory.workers("oak")) == 1


# Behind a gateway that has no weights ------------------------------------------------------

OLD, NEW = (evolve(INFO, digest=(*OWN, *digest({WEIGHTS: each}))) for each in (b"old", b"new"))


def announce(directory: Directory, node: str, *infos: EngineInfo, up: bool = True, draining: bool = False) -> None:
    """Let a node announce workers with these models."""
    if directory.node(node).link is None:
        directory.linked(node, idle_link())
    offers = tuple(evolve(offer(f"w{at}", info), up=up) for at, info in enumerate(infos))
    directory.merge_state(node, NodeState(offers, draining=draining))


def asked(directory: Directory) -> list[Any]:
    return [worker.load.name for worker in directory.workers("oak")]


async def test_of_two_engines_whose_weights_differ_the_second_is_refused_by_name(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    announce(directory, "a", OLD)
    announce(directory, "b", NEW)
    assert asked(directory) == ["a/w0"]
    why = "its model is another one: its weights are not those of a/w0"
    assert [(record.peer, record.engine, record.reason) for record in log_records(caplog)] == [("b", "w0", why)]
    status = await status_of(directory)
    assert status.refused == (f"engine b/w0 is not asked: {why}",)
    metrics = Metrics()
    gauges.add_node_gauges(metrics.registry, directory)
    assert 'espalier_engine_model_mismatch{engine="b/w0"} 1.0' in metrics.render({}).decode()
    assert readiness.engines_up(directory) == {"a/w0": 1.0, "b/w0": 0.0}
    assert readiness.unready(directory, ["oak"]) is None


@pytest.mark.parametrize("goes", ["link", "down", "drain"])
async def test_other_weights_are_served_once_the_served_ones_are_gone(directory: Directory, goes: str) -> None:
    announce(directory, "a", OLD)
    announce(directory, "b", NEW)
    if goes == "link":
        unlink(directory, "a")
    else:
        announce(directory, "a", OLD, up=goes != "down", draining=goes == "drain")
    assert asked(directory) == ["b/w0"]
    assert directory.models.rejections == ({} if goes == "link" else directory.models.rejections)
    announce(directory, "a", OLD)
    assert asked(directory) == ["b/w0"], "of equally many those are served that were before"
    assert list(directory.models.rejections) == ["a/w0"]


async def test_the_weights_that_most_have_are_served_and_loads_are_kept(directory: Directory) -> None:
    announce(directory, "a", OLD, OLD)
    announce(directory, "b", NEW, NEW)
    directory.merge_loads("b", LoadUpdate((InFlightCounts("w0", 2, 7),)))
    announce(directory, "c", NEW)
    assert asked(directory) == ["b/w0", "b/w1", "c/w0"]
    assert (directory.workers("oak")[0].load.busy, directory.workers("oak")[0].load.tokens) == (2, 7)
    assert list(directory.models.rejections) == ["a/w0", "a/w1"]
    for leaves in "bc":
        unlink(directory, leaves)
    assert asked(directory) == ["a/w0", "a/w1"]


async def test_weights_of_a_gateway_that_has_them_decide_however_many_have_others() -> None:
    directory = Directory("main", models=ModelIdentities({"oak": OLD.digest}))
    announce(directory, "b", NEW, NEW)
    announce(directory, "a", OLD)
    assert asked(directory) == ["a/w0"]


def test_names_of_models_that_no_node_announces_any_more_are_not_kept() -> None:
    models = ModelIdentities({"oak": OWN})
    for number in range(100):
        each = evolve(offer("w", OLD), model=f"model {number}")
        models.apply("a", NodeState((each, offer("w0", OLD))))
        assert (set(models.served_weights), models.statistics().models) == ({"oak", each.model}, 2)
    models.forget("a")
    assert models.statistics() == ModelIdentityStatistics(nodes=0, models=0)
    assert set(models.served_weights) == {"oak"}, "an answer goes on with no other weights than it has begun with"


words = st.tuples(st.sampled_from("abc"), st.lists(st.sampled_from([OLD, NEW, INFO, SMALL]), max_size=3), st.booleans())


@given(st.lists(words, max_size=12))
def test_whatever_nodes_announce_the_weights_that_most_available_workers_have_are_served(
    announcements: list[Any],
) -> None:
    async def scenario() -> None:
        await trio.lowlevel.checkpoint()
        directory, last = Directory("here", models=ModelIdentities({"oak": OWN})), {}
        for node, infos, up in announcements:
            announce(directory, node, *infos, up=up)
            last[node] = infos if up else []
            counts = Counter(info.digest for infos in last.values() for info in infos)
            served = {worker.offer.engine.digest for worker in directory.workers("oak") if worker.offer.engine}
            weights = served & {OLD.digest, NEW.digest}
            assert len(weights) == bool(counts[OLD.digest] + counts[NEW.digest])
            assert all(counts[each] == max(counts[OLD.digest], counts[NEW.digest]) for each in weights)
            assert served - weights == ({OWN} if counts[OWN] else set())
        for node in last:
            unlink(directory, node)
        assert directory.models.statistics() == ModelIdentityStatistics(nodes=0, models=0)

    trio.run(scenario)


async def test_a_gateway_has_the_digests_of_its_models(tmp_path: Path) -> None:
    assembly, _ = built_assembly(cluster(tmp_path), "front")
    [(name, own)] = assembly.directory.models.digests.items()
    assert name == "tiny"
    assert {"config.json", "tokenizer.json"} <= {file for file, _ in own}


async def test_an_engine_whose_folder_has_changed_since_this_node_read_it_gets_no_work() -> None:
    registration: Registration[Any] = Registration()
    unused: Any = None
    engine = LocalEngine("e", unused, registration, unused, lambda: None, lambda: None, digest=OWN)
    with (
        registration.publish(SimpleNamespace(info=SMALL)),
        pytest.raises(StartFailed, match=r"engine e is not asked: its model .* it differs in tokenizer\.json"),
    ):
        await run_requests(engine, unused, task_status=trio.TASK_STATUS_IGNORED)


async def test_a_simulated_engine_announces_the_digest_of_its_model(tmp_path: Path) -> None:
    assembly, _ = built_assembly(cluster(tmp_path), "back")
    assert SimulatedEngine(SimulatedSpec(), Random(0), digest=OWN).info.digest == OWN
    assert assembly.directory.models.digests.keys() == {"tiny"}
