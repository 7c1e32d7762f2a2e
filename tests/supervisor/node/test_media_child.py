"""The media actor stands in the tree of a gateway whose models take images or videos, with all of its limits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio
from attrs import evolve

from protocol.errors import StartFailed
from protocol.messages.media import Media, MediaItem, MediaPrepared, Modality, PrepareMedia
from supervisor.config.schema import Cluster
from supervisor.engines.kind import NodeContext
from supervisor.engines.kinds import read_cluster
from supervisor.node.media_child import MediaChildren, media_children, tls_context
from supervisor.node.text_models import load_text_models
from supervisor.supervision.supervise import supervise
from tests.rig import media_samples as samples
from tests.rig.assembly import built_assembly, built_runtime
from tests.supervisor.media.test_decoding import processes

Written = Callable[[str], Path]
TINY = Path(__file__).parents[3] / "examples" / "tiny"
FILE = """
[gateway]
node = "front"
{media}
[node.front]
listen = "127.0.0.1:7401"
[node.back]
listen = "127.0.0.1:7402"
[model.seeing]
path = "{folder}"
[engine.one]
node = "back"
model = "seeing"
kind = "simulated"
kv_tokens_max = 4096
"""
VISION = {"model_type": "qwen2_vl", "image_token_id": 5, "video_token_id": 6, "vision_config": {"patch_size": 14}}
LIMITS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 200_704}


@pytest.fixture
def seeing(tmp_path: Path, written: Written) -> Callable[[str], Cluster]:
    """Return a function that makes a cluster whose only model takes images and videos."""
    folder = tmp_path / "seeing"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | VISION))
    (folder / "preprocessor_config.json").write_text(json.dumps(LIMITS))

    def make(media: str) -> Cluster:
        return read_cluster(written(FILE.format(folder=folder, media=media)))

    return make


def test_only_the_node_of_a_gateway_has_it(seeing: Callable[[str], Cluster]) -> None:
    cluster = seeing("")
    names = {node: [child.name for child in built_assembly(cluster, node)[0].tree.children] for node in cluster.node}
    assert "media" in names["front"]
    assert "media" not in names["back"]
    assert names["front"].index("media") < names["front"].index("processor-seeing")


async def test_a_gateway_of_models_of_text_has_none(written: Written) -> None:
    cluster = read_cluster(written(FILE.format(folder=TINY, media="")))
    assembly, metrics = built_assembly(cluster, "front")
    assert "media" not in [child.name for child in assembly.tree.children]
    text = metrics.render({}).decode()
    assert 'espalier_media_bytes{kind="prepared"} 0' in text
    assert 'espalier_media_bytes{kind="embedded"} 0' in text
    assert 'espalier_media_waiting{kind="embedded_bytes"} 0' in text
    assert 'espalier_media_running{kind="decodes"} 0' in text


def test_a_private_authority_is_trusted_on_every_python_alike() -> None:
    assert not tls_context(None).verify_flags & ssl.VERIFY_X509_STRICT


def test_a_file_of_authorities_that_is_none_is_a_reason_not_to_start(tmp_path: Path) -> None:
    file = tmp_path / "authority.pem"
    file.write_text("no certificate")
    with pytest.raises(StartFailed, match=r"gateway\.media\.tls_authority: .* cannot be used"):
        tls_context(file)


@asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[MediaChildren]:
    runtime = evolve(built_runtime(), logs=cluster.folder)
    context = NodeContext(cluster, "front", runtime, built_assembly(cluster, "front")[0].directory)
    media = media_children(context, load_text_models(cluster, "front", str, ""))
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: supervise(media.children[0], rng=Random(0), task_status=task_status))
        yield media
        nursery.cancel_scope.cancel()
    assert processes() == []


async def prepared(media: MediaChildren, *items: Media) -> tuple[MediaItem, ...]:
    assert media.address is not None
    async with media.address.ask(PrepareMedia("1", "seeing", items), 1) as answer:
        async for reply in answer:
            assert isinstance(reply, MediaPrepared)
            return reply.items
    raise AssertionError("an answer without a reply")


@pytest.mark.realtime
async def test_it_prepares_images_and_videos(seeing: Callable[[str], Cluster]) -> None:
    async with running(seeing("")) as media:
        with trio.fail_after(60):
            image, video = await prepared(
                media,
                samples.image_of(samples.jpeg(640, 480)),
                Media(Modality.VIDEO, samples.data_url(samples.video(), "video/mp4")),
            )
        assert (image.grid, image.tokens) == ((1, 26, 36), 234)
        assert image.data.shape[-1] == 3
        assert video.tokens == video.grid[0] * video.grid[1] * video.grid[2] // 4


@pytest.mark.realtime
async def test_decoders_that_die_are_started_again(seeing: Callable[[str], Cluster]) -> None:
    async with running(seeing("")) as media:
        for _ in range(2):
            with trio.fail_after(60):
                await prepared(media, samples.image_of(samples.png()))
            os.kill(processes()[0], signal.SIGKILL)
            await trio.sleep(0.1)
        with trio.fail_after(60):  # it waits for the next one
            await prepared(media, samples.image_of(samples.png()))
