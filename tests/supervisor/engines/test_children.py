"""The children of a node's encoders, assembled from a file and run."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.lowlevel
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.encoder import SimulatedEncoder
from protocol.errors import BadRequest, StartFailed
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineLoad, GetLoad
from protocol.messages.generation import Generate, Sampling, Started
from protocol.messages.media import Encode, Encoded, MediaForm
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from supervisor.cluster import engine_control, operations
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.kinds import read_cluster
from supervisor.node.assembly import Assembly
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import render
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL
from tests.rig.encoders import MEDIA, embedded, encode, image, new_id, video

MEDIA_KEYS = "simulated.media = { image_token = 90, video_token = 91, width = 8 }\n"
FILE = f"""
[node.main]
listen = "127.0.0.1:7401"
[gateway]
port = 0
{MODEL}[engine.one]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
{MEDIA_KEYS}[engine.eyes]
model = "tiny"
kind = "simulated"
leg = "encode"
{MEDIA_KEYS}"""


@pytest.fixture
def built(written: Callable[[str], Path]) -> Callable[..., tuple[Assembly, Metrics]]:
    return lambda more="": built_assembly(read_cluster(written(FILE + more)), "main")


@asynccontextmanager
async def running(assembly: Assembly, name: str = "eyes") -> AsyncIterator[LocalWorker]:
    """Run the engines of a node, and yield one of its workers."""
    names = {*assembly.engines, *assembly.node_engines.encoders}
    members = [child for child in assembly.tree.children if child.name in names]
    tree = evolve(assembly.tree, children=tuple(evolve(child, needs=()) for child in members))
    async with trio.open_nursery() as nursery:
        run = partial(supervise, tree, on_event=assembly.on_event, rng=random.Random(0))
        await nursery.start(lambda task_status: run(task_status=task_status))
        yield assembly.directory.local[name]
        nursery.cancel_scope.cancel()


async def ask(worker: LocalWorker, request: Encode) -> Encoded:
    async with worker.ask(request, 0) as answer:
        result = await answer.result()
    assert result is not None
    return result


def test_the_tree_has_an_encoder_beside_its_engine_and_its_limits(
    built: Callable[..., tuple[Assembly, Metrics]],
) -> None:
    assembly, _ = built("encoder.batch_max = 4\n")
    text = render(assembly.tree)
    assert "images and videos in batches" in text
    assert "batch max 4" in text
    names = {child.name: child for child in assembly.tree.children}
    assert [child.name for child in names["eyes"].children] == ["engine", "encoder"]  # type: ignore[union-attr]
    assert (set(assembly.engines), set(assembly.node_engines.encoders)) == ({"one"}, {"eyes"})
    assert assembly.directory.legs("tiny") == {"main/one": Leg.BOTH, "main/eyes": Leg.ENCODE}
    assert assembly.links is not None
    services = assembly.links.services.keys()
    assert {("eyes", Encode), ("eyes", GetLoad), ("eyes", FlushCache), ("one", Generate)} <= services
    assert not {("eyes", Generate), ("one", Encode)} & services


@pytest.mark.parametrize(
    ("policy", "keys", "held"),
    [
        ("kv", "", True),
        ("least_loaded", "", False),
        ("kv", "simulated.prefix_cache = false", False),
        ("kv", "events.publish = false", False),
    ],
)
async def test_prompts_are_held_back_where_routers_know_what_is_cached(
    policy: str, keys: str, held: bool, written: Callable[[str], Path], autojump_clock: MockClock
) -> None:
    engine = f'[engine.one]\nmodel = "tiny"\nkind = "simulated"\nkv_tokens_max = 4096\n{keys}\n'
    assembly, _ = built_assembly(read_cluster(written(f'{MODEL}policy = "{policy}"\n{engine}')), "main")
    tokens, begun_at = list(range(100, 500)), list[float]()

    async def ask_for_one(number: int) -> None:
        request = Generate(new_id(number), TokenIds.of(tokens), Sampling(1, ignore_eos=True))
        async with assembly.directory.local["one"].ask(request, 1) as answer:
            async for reply in answer:
                if isinstance(reply, Started):
                    begun_at.append(trio.current_time())

    (one,) = (child for child in assembly.tree.children if child.name == "one")
    tree = evolve(assembly.tree, children=(evolve(one, needs=()),))
    async with trio.open_nursery() as nursery:
        run = partial(supervise, tree, on_event=assembly.on_event, rng=random.Random(0))
        await nursery.start(lambda task_status: run(task_status=task_status))
        async with trio.open_nursery() as asking:
            asking.start_soon(ask_for_one, 1)
            asking.start_soon(ask_for_one, 2)
        nursery.cancel_scope.cancel()
    assert (begun_at[0] < begun_at[1]) is held, "else both are computed in one step"


async def test_a_node_encodes_and_counts_what_it_does(
    built: Callable[..., tuple[Assembly, Metrics]], autojump_clock: MockClock
) -> None:
    assembly, metrics = built()
    async with running(assembly) as worker:
        result = await ask(worker, encode("a", new_id(1)))
        assert bytes(result.item.data.data) == bytes((await embedded(image("a"))).data.data)
        assert result.item.form is MediaForm.EMBEDDINGS
        assert (await ask(worker, encode("a", new_id(2)))).cached
        await ask(worker, encode(video("v"), new_id(3)))
        with pytest.raises(BadRequest):
            await ask(worker, encode(evolve(image("b"), tokens=3), new_id(4)))
        assert worker.offer.engine is not None
        assert worker.offer.engine.media == MEDIA
        text = metrics.render({}).decode()
    samples = re.findall(r"^espalier_encoder_(\w+{.*}) (.*)$", text, re.MULTILINE)
    found = {name: float(value) for name, value in samples if "_bucket" not in name and "_sum" not in name}
    assert found == {
        'requests_total{engine="main/eyes",modality="image",outcome="encoded"}': 1,
        'requests_total{engine="main/eyes",modality="image",outcome="cached"}': 1,
        'requests_total{engine="main/eyes",modality="image",outcome="invalid_request"}': 1,
        'requests_total{engine="main/eyes",modality="video",outcome="encoded"}': 1,
        'items_total{engine="main/eyes",modality="image"}': 1,
        'items_total{engine="main/eyes",modality="video"}': 1,
        'tokens_total{engine="main/eyes",modality="image"}': 4,
        'tokens_total{engine="main/eyes",modality="video"}': 8,
        'batch_duration_seconds_count{engine="main/eyes",outcome="ended"}': 2,
        'wait_duration_seconds_count{engine="main/eyes"}': 2,
        'queue_items{engine="main/eyes",state="waiting"}': 0,
        'queue_items{engine="main/eyes",state="computing"}': 0,
        'cache_bytes{engine="main/eyes"}': 12 * 8 * 2,
        'cache_evictions_total{engine="main/eyes"}': 0,
    }


async def test_the_caches_of_a_cluster_are_flushed_with_those_of_its_encoders(
    built: Callable[..., tuple[Assembly, Metrics]], autojump_clock: MockClock
) -> None:
    assembly, _ = built()
    async with running(assembly) as worker:
        await ask(worker, encode("a", new_id(1)))
        await operations.operate(assembly.directory, FlushCache())
        assert not (await ask(worker, encode("a", new_id(2)))).cached
        assert await engine_control.cluster_loads(assembly.directory) == dict.fromkeys(
            ("main/eyes", "main/one"), EngineLoad(0, 0, 0)
        )


async def test_an_encoder_that_crashes_is_restarted_and_remembers_nothing(
    built: Callable[..., tuple[Assembly, Metrics]], autojump_clock: MockClock
) -> None:
    assembly, _ = built()
    async with running(assembly) as worker:
        await ask(worker, encode("a", new_id(1)))
        first = worker.engine.current
        assert isinstance(first, SimulatedEncoder)
        first.crash()
        await trio.sleep(0.05)  # its actor has ended as well
        assert not (await ask(worker, encode("a", new_id(2)))).cached, "the next life has not made it"
        assert worker.engine.current not in {None, first}


def test_an_encoder_of_a_model_without_images_cannot_start(written: Callable[[str], Path]) -> None:
    text = FILE.replace(MEDIA_KEYS, "")
    with pytest.raises(StartFailed, match="engine eyes has nothing to encode: tiny takes no images and no videos"):
        built_assembly(read_cluster(written(text)), "main")
