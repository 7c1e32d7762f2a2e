"""Embedders in `cluster.toml`: the keys that are for other engines, and models of another task."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from actors.engines.sglang import boot_message
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from supervisor.engines.kinds import read_cluster
from supervisor.engines.sglang import host_checks
from supervisor.engines.sglang.children import spec_of

FILE = """\
[model.vectors]
path = "."
[engine.one]
model = "vectors"
device = "cpu"
kv_tokens_max = 4096
"""
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "answers": {"architectures": ["Qwen3ForCausalLM"]},
    "vectors": {"architectures": ["BertModel"], "max_position_embeddings": 512},
    "scores": {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
}


@pytest.mark.parametrize(
    ("lines", "mistake"),
    [
        ('vision = "tower"', "engine.one.vision: is for engines that compute answers, and engine.one.task is embed"),
        ("metrics = true", "engine.one.metrics: is for engines that compute answers"),
        ("data_parallel = 2", "engine.one.data_parallel: is for engines that compute answers"),
        ('diffusion = "LowConfidence"', "engine.one.diffusion: is for engines that compute answers"),
        ("settings.is_embedding = true", "engine.one.settings.is_embedding: is given by task"),
    ],
)
def test_keys_of_engines_that_compute_answers_are_refused(lines: str, mistake: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'{FILE}task = "embed"\n{lines}\n')
    with pytest.raises(StartFailed, match=re.escape(mistake)):
        read_cluster(file)


@pytest.mark.parametrize(
    ("task", "kind", "mistake"),
    [
        ("generate", "answers", None),
        ("generate", "vectors", "is generate, and vectors is a BertModel, which computes vectors and no answers"),
        ("generate", "scores", "is generate, and vectors is a BertForSequenceClassification, which computes scores"),
        ("embed", "answers", None),
        ("embed", "vectors", None),
        ("embed", "scores", "is embed, and vectors is a BertForSequenceClassification, which computes scores"),
        ("score", "answers", "is score, and vectors is a Qwen3ForCausalLM, which computes no scores of pairs"),
        ("score", "scores", None),
    ],
)
def test_a_model_of_another_task_is_a_mistake(task: str, kind: str, mistake: str | None, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'{FILE}task = "{task}"\n')
    (tmp_path / "config.json").write_text(json.dumps(CONFIGURATIONS[kind]))
    cluster = read_cluster(file)
    found = [str(each) for each in host_checks.mistakes(cluster, cluster.engine["one"], "engine.one", {})]
    assert len(found) == (mistake is not None)
    assert all(each.startswith("engine.one.task") and str(mistake) in each for each in found)


def test_the_host_of_an_embedder_is_told_its_task(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'{FILE}task = "score"\nslots = 5\nprefill_chunk = 128\n')
    spec = spec_of(read_cluster(file), "one")
    boot = boot_message.build(spec, "folder")
    assert (spec.leg, boot.task, boot.requests_max) == (Leg.EMBED, "score", 5)
    assert boot.arguments["is_embedding"] is True
    assert boot.arguments["chunked_prefill_size"] == 128
    assert boot.arguments["max_running_requests"] == boot_message.ITEMS_RUNNING_MAX
