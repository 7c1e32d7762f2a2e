"""Encoders and vision towers in `cluster.toml`: which engine has what, decided in one place, and what contradicts it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from actors.engines.sglang import boot_message
from actors.engines.sglang.boot_message import EMBEDDINGS_ONLY, VISION_PART
from protocol.errors import StartFailed
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.engines.sglang import ranks
from supervisor.engines.sglang.children import spec_of
from supervisor.supervision.tree import render
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import TINY

MODEL = """\
[model.seeing]
path = "."
"""
ONE = """\
[engine.one]
model = "seeing"
device = "cpu"
kv_tokens_max = 4096
"""
TWO = ONE.replace("one", "two")
FILE = MODEL + ONE
OTHER = MODEL.replace("seeing", "other")
ENCODER = """\
[engine.eyes]
model = "seeing"
device = "cpu"
leg = "encode"
"""
JOIN = '[cluster]\njoin = ["10.0.0.9:7400"]\n[node.main]\nlisten = "127.0.0.1:7401"\n'
PAIR = """\
[engine.one]
model = "seeing"
device = "cpu"
kv_tokens_max = 4096
leg = "prefill"
bootstrap_port = 9000
[engine.two]
model = "seeing"
device = "cpu"
kv_tokens_max = 4096
leg = "decode"
"""

Read: TypeAlias = Callable[[str], Cluster]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(text: str) -> Cluster:
        (tmp_path / "cluster.toml").write_text(text)
        return read_cluster(tmp_path / "cluster.toml")

    return read


def boot(cluster: Cluster, name: str) -> tuple[bool, bool]:
    """Return whether the images of an engine are pixels, and whether it loads a tower."""
    message = boot_message.build(spec_of(cluster, name), "folder")
    return message.has_tower, message.environment.get(VISION_PART) != EMBEDDINGS_ONLY


@pytest.mark.parametrize(
    ("text", "engines"),
    [
        (FILE, {"one": (True, True)}),
        (FILE + ENCODER, {"one": (False, False)}),
        (FILE + 'vision = "tower"\n' + ENCODER, {"one": (True, True)}),
        (JOIN + FILE + 'vision = "embeddings"\n', {"one": (False, False)}),
        (MODEL + PAIR, {"one": (True, True), "two": (True, False)}),
        (MODEL + PAIR + ENCODER, {"one": (False, False), "two": (False, False)}),
        (
            OTHER + FILE + ENCODER.replace("seeing", "other") + TWO.replace("seeing", "other"),
            {"one": (True, True), "two": (False, False)},
        ),
    ],
)
def test_an_engine_has_a_tower_unless_another_encodes_for_it_and_a_decode_never_loads_one(
    text: str, engines: dict[str, tuple[bool, bool]], read: Read
) -> None:
    cluster = read(text)
    assert {name: boot(cluster, name) for name in engines} == engines


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (FILE + 'vision = "eyes"\n', 'engine.one.vision: expected "tower" or "embeddings", got "eyes"'),
        (FILE + 'vision = "embeddings"\n', "engine.one.vision: nothing makes embeddings: there is no engine of seeing"),
        (
            FILE + ENCODER + TWO + 'vision = "tower"\n',
            "engine.two.vision: engine one of the same model takes embeddings, and a request may go to either",
        ),
        (
            JOIN + FILE + 'vision = "embeddings"\n' + TWO,
            "engine.one.vision: engine two of the same model takes pixels, and a request may go to either",
        ),
        (FILE + ENCODER + "tensor_parallel = 2\n", "engine.eyes.tensor_parallel: an encoder has one rank"),
        (FILE + "settings.enable_multimodal = false\n", "engine.one.settings.enable_multimodal: is given by vision"),
        (FILE + "settings.mm_preprocess_cache_size_mb = 1\n", "cannot be set: images and videos are made into the"),
    ],
)
def test_what_keeps_engines_from_taking_the_same_images_is_a_mistake(text: str, mistake: str, read: Read) -> None:
    with pytest.raises(StartFailed, match=re.escape(mistake)):
        read(text)


def test_an_encoder_is_started_without_what_only_tokens_need(read: Read) -> None:
    cluster = read(FILE + ENCODER + "encoder.batch_max = 5\nsettings.dtype = 'float32'\n")
    message = boot_message.build(spec_of(cluster, "eyes"), "folder")
    assert (message.batch_max, message.checks) == (5, None)
    assert message.arguments["encoder_only"] is True
    assert message.arguments["dtype"] == "float32"
    assert (
        not {"max_total_tokens", "max_running_requests", "page_size", "chunked_prefill_size"} & message.arguments.keys()
    )
    assert boot_message.decode(boot_message.encode(message)) == message


def test_ranks_on_nodes_whose_files_differ_about_encoders_do_not_agree(read: Read) -> None:
    files = (FILE, FILE + ENCODER, FILE + 'vision = "tower"\n' + ENCODER)
    one, two, three = (ranks.shared_keys(read(text), "one")["vision"] for text in files)
    assert (one, two, three) == ('"tower"', '"embeddings"', '"tower"')


def test_the_tree_has_an_encoder_beside_its_engine_behind_the_same_zygote_and_no_grammars_of_its_own(
    read: Read,
) -> None:
    assembly, _ = built_assembly(read(FILE.replace('path = "."', f'path = "{TINY}"') + ENCODER), "main")
    text = render(assembly.tree)
    assert "SGLang's vision tower, in a process of its own" in text
    assert "grammars-one" in text
    assert "grammars-eyes" not in text
