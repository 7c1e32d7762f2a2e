"""The children of a node's embedders, assembled from a file and run."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.engines.simulated.embedder import SimulatedEmbedder, vector
from protocol.errors import BadRequest, NotFound, StartFailed
from protocol.messages.cluster import Leg
from protocol.messages.embedding import Embed, EmbeddingInfo, EmbeddingOutput, Pooling, Vectors
from protocol.messages.engine import EngineLoad, GetLoad
from protocol.messages.generation import Generate
from protocol.messages.operations import FlushCache
from protocol.messages.role import SetRole
from supervisor.cluster import engine_control, models, operations, readiness
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.kinds import read_cluster
from supervisor.node.assembly import Assembly
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import render
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL
from tests.rig.embedders import text
from tests.rig.encoders import new_id

VECTORS = EmbeddingInfo(EmbeddingOutput.VECTORS, 8, Pooling.LAST, normalised=True, is_matryoshka=True)
FILE = f"""
[node.main]
listen = "127.0.0.1:7401"
[node.front]
listen = "127.0.0.1:7402"
[gateway]
node = "front"
port = 0
{MODEL}[engine.nearby]
model = "tiny"
kind = "simulated"
task = "embed"
kv_tokens_max = 4096
simulated.width = 8
"""


@pytest.fixture
def built(written: Callable[[str], Path]) -> Callable[..., tuple[Assembly, Metrics]]:
    return lambda more="": built_assembly(read_cluster(written(FILE + more)), "main")


@asynccontextmanager
async def running(assembly: Assembly) -> AsyncIterator[LocalWorker]:
    """Run the embedder of a node, and yield its worker."""
    members = [
        evolve(child, needs=()) for child in assembly.tree.children if child.name in assembly.node_engines.embedders
    ]
    tree = evolve(assembly.tree, children=tuple(members))
    async with trio.open_nursery() as nursery:
        run = partial(supervise, tree, on_event=assembly.on_event, rng=random.Random(0))
        await nursery.start(lambda task_status: run(task_status=task_status))
        yield assembly.directory.local["nearby"]
        nursery.cancel_scope.cancel()


async def ask(worker: LocalWorker, number: int, *ids: int) -> Vectors:
    async with worker.ask(Embed(new_id(number), (text(*ids),)), 0) as answer:
        result = await answer.result()
    assert result is not None
    return result


def test_the_tree_has_an_embedder_beside_its_engine_and_its_limits(
    built: Callable[..., tuple[Assembly, Metrics]],
) -> None:
    assembly, _ = built("deadlines.total_s = 7.0\n")
    assert "computing s 7" in render(assembly.tree)
    names = {child.name: child for child in assembly.tree.children}
    assert [child.name for child in names["nearby"].children] == ["engine", "embedder"]  # type: ignore[union-attr]
    assert (set(assembly.engines), set(assembly.node_engines.encoders), set(assembly.node_engines.embedders)) == (
        set(),
        set(),
        {"nearby"},
    )
    assert assembly.directory.legs("tiny") == {"main/nearby": Leg.EMBED}
    assert assembly.links is not None
    services = assembly.links.services.keys()
    assert {("nearby", Embed), ("nearby", GetLoad)} <= services
    assert not {("nearby", Generate), ("nearby", FlushCache)} & services


async def test_a_node_computes_vectors_and_counts_what_it_does(
    built: Callable[..., tuple[Assembly, Metrics]], autojump_clock: MockClock
) -> None:
    assembly, metrics = built()
    assert readiness.never_ready(assembly.directory, ["tiny"]) == "engine nearby is still starting"
    async with running(assembly) as worker:
        vectors = await ask(worker, 1, 5, 6)
        assert bytes(vectors.data.data) == vector(text(5, 6), VECTORS).tobytes()
        with pytest.raises(BadRequest):
            await ask(worker, 2)
        engine = worker.offer.engine
        assert engine is not None
        assert engine.embedding == VECTORS
        assert engine.request_tokens_max == models.request_tokens_max(assembly.directory, "tiny") == 4096
        assert readiness.unready(assembly.directory, ["tiny"]) is None
        assert await engine_control.cluster_loads(assembly.directory) == {"main/nearby": EngineLoad(0, 0, 0)}
        written = metrics.render({}).decode()
    samples = re.findall(r"^espalier_embedder_(\w+{.*}) (.*)$", written, re.MULTILINE)
    found = {name: float(value) for name, value in samples if "_bucket" not in name and "_sum" not in name}
    assert found == {
        'request_duration_seconds_count{engine="main/nearby",outcome="ended"}': 1,
        'request_duration_seconds_count{engine="main/nearby",outcome="invalid_request"}': 1,
        'items_total{engine="main/nearby"}': 1,
        'tokens_total{engine="main/nearby"}': 2,
    }
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine nearby is starting"


async def test_no_operation_is_for_an_embedder(
    built: Callable[..., tuple[Assembly, Metrics]], autojump_clock: MockClock
) -> None:
    assembly, _ = built()
    async with running(assembly):
        assert await operations.operate(assembly.directory, FlushCache()) == {}
        for request in (FlushCache(), SetRole(role=Leg.PREFILL)):
            with pytest.raises(NotFound, match="there is no engine 'nearby' that"):
                await operations.operate(assembly.directory, request, "nearby")


async def test_an_embedder_that_crashes_is_restarted_and_its_waiting_requests_are_answered(
    built: Callable[..., tuple[Assembly, Metrics]], autojump_clock: MockClock
) -> None:
    assembly, _ = built()
    async with running(assembly) as worker:
        engine = assembly.node_engines.embedders["nearby"].live
        assert isinstance(engine, SimulatedEmbedder)
        engine.crash()
        await wait_all_tasks_blocked()
        await ask(worker, 1, 5)
        assert assembly.node_engines.embedders["nearby"].live is not engine


async def test_a_scorer_returns_one_number_of_a_pair(written: Callable[[str], Path], autojump_clock: MockClock) -> None:
    cluster = read_cluster(written(FILE.replace('"embed"', '"score"')))
    assembly, _ = built_assembly(cluster, "main")
    async with running(assembly) as worker:
        async with worker.ask(Embed(new_id(1), (text(5, 6, second_at=1),)), 0) as answer:
            result = await answer.result()
        assert result is not None
        assert result.data.shape == (1, 1)


def test_an_embedder_without_a_tokenizer_cannot_start(written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    text = re.sub(r'path = ".*"', f'path = "{folder}"', FILE)
    with pytest.raises(StartFailed, match=r"engine nearby has no vocabulary: .*tokenizer.json cannot be read"):
        built_assembly(read_cluster(written(text)), "main")
