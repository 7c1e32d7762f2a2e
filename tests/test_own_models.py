"""A worker that serves another model under a model's name is told by name, everywhere, and never asked."""

from __future__ import annotations

import logging
from io import StringIO
from types import SimpleNamespace

import pytest
import trio
from attrs import evolve
from rich.console import Console

from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import SimulatedSpec
from protocol.cluster import GetStatus, Leg, NodeState, Offer
from protocol.errors import PeerViolation, StartFailed
from protocol.messages import EngineInfo
from protocol.model_folder import WEIGHTS, digest
from supervisor import known
from supervisor.board import board
from supervisor.controls import Controls
from supervisor.directory import Directory
from supervisor.own_models import OwnModels
from supervisor.plug import Plug
from supervisor.workers import Worker, _decode
from tests.houses import built
from tests.test_directory import a_link
from tests.test_metrics import cluster

OWN = digest({"config.json": b"{}", "tokenizer.json": b"[]"})
OTHER = digest({"config.json": b"{}", "tokenizer.json": b"[1]"})
INFO = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True, digest=OWN)
SMALL = evolve(INFO, request_tokens_max=8, digest=OTHER)
WHY = "is not asked: its model is another one: it differs in tokenizer.json"


def offer(name, info):
    return Offer(name, "oak", Leg.BOTH, 4, up=True, engine=info)


@pytest.fixture
async def directory():
    directory = Directory("here", models=OwnModels({"oak": OWN}))
    directory.linked("far", a_link())
    return directory


async def no_loads():
    return {}


async def test_c8_a_worker_of_another_model_is_never_asked_and_its_limits_count_for_nobody(directory):
    directory.told("far", NodeState((offer("one", INFO), offer("two", SMALL))))
    assert [worker.load.name for worker in directory.workers("oak")] == ["far/one"]
    assert known.longest(directory, "oak") == INFO.request_tokens_max
    assert known.up(directory) == {"far/one": 1.0, "far/two": 0.0}
    assert known.unready(directory, ["oak"]) is None, "another one serves it"


async def test_c8_ready_and_refused_requests_say_by_name_which_worker_and_what_differs(directory):
    directory.told("far", NodeState((offer("two", SMALL),)))
    assert known.unready(directory, ["oak"]) == known.never_ready(directory, ["oak"]) == f"engine two {WHY}"
    directory.told("far", NodeState((offer("two", INFO),)))
    assert known.unready(directory, ["oak"]) is known.never_ready(directory, ["oak"]) is None
    assert [worker.load.name for worker in directory.workers("oak")] == ["far/two"]


async def test_c8_the_log_says_it_once_and_the_status_as_long_as_it_is_so(directory, caplog):
    controls = Controls(directory, "run", "1", no_loads)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            directory.told("far", NodeState((offer("two", SMALL),)))
    [record] = caplog.records
    assert (record.peer, record.engine) == ("far", "two")
    assert record.reason == "its model is another one: it differs in tokenizer.json"
    status = await controls.answer(GetStatus())
    assert status.refused == (f"engine far/two {WHY}",)
    console = Console(width=200, record=True, file=StringIO())
    console.print(board("espalier", {"here": status}))
    assert f"node here does without an engine: engine far/two {WHY}" in console.export_text()
    link = directory.nodes["far"][1]
    directory.unlinked("far", link)
    assert (await controls.answer(GetStatus())).refused == ()


@pytest.mark.parametrize("told", [(), (*OWN, *digest({WEIGHTS: b"some"}))])
async def test_c8_who_tells_no_digest_or_has_weights_beside_is_asked(directory, told):
    directory.told("far", NodeState((offer("one", evolve(INFO, digest=told)),)))
    assert len(directory.workers("oak")) == 1


async def test_c8_a_digest_without_end_is_not_believed(directory):
    with pytest.raises(PeerViolation, match="longer than any"):
        directory.told("far", NodeState((offer("one", evolve(INFO, digest=OWN * 100)),)))
    assert directory.workers("oak") == []


async def test_a_front_knows_its_models_folders(tmp_path):
    house, _ = built(cluster(tmp_path), "front")
    [(name, own)] = house.directory.models.digests.items()
    assert name == "tiny"
    assert {"config.json", "tokenizer.json"} <= {file for file, _ in own}


async def test_c8_an_engine_whose_folder_has_changed_since_this_node_read_it_gets_no_work():
    plug = Plug()
    one = Worker("e", None, None, plug, None, lambda: None, lambda: None, digest=OWN)
    with (
        plug.offering(SimpleNamespace(info=SMALL)),
        pytest.raises(StartFailed, match=r"engine e is not asked: its model .* it differs in tokenizer\.json"),
    ):
        await _decode(one, None, task_status=trio.TASK_STATUS_IGNORED)


async def test_a_simulated_engine_tells_what_it_speaks_by(tmp_path):
    house, _ = built(cluster(tmp_path), "back")
    assert SimulatedEngine(SimulatedSpec(), None, digest=OWN).info.digest == OWN
    assert house.directory.models.digests.keys() == {"tiny"}
