"""Models of vectors and of scores beside one that answers, as a node with a gateway has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.node import preview
from tests.rig.assembly import built_assembly
from tests.rig.embedded_texts import bert_files
from tests.supervisor.config.test_load import ROOT

EXAMPLE = ROOT / "examples" / "embeddings.toml"


def with_folder(folder: Path, **files: bytes | None) -> Cluster:
    """Return the cluster of the example, whose model of vectors is in a folder with a tokenizer and these files."""
    for name, contents in (bert_files() | {f"{name}.json": each for name, each in files.items()}).items():
        if contents is not None:
            (folder / name).write_bytes(contents)
    cluster = read_cluster(EXAMPLE)
    return evolve(cluster, model=cluster.model | {"vectors": evolve(cluster.model["vectors"], path=str(folder))})


def test_each_model_has_the_children_of_its_task() -> None:
    text = preview.describe_node(read_cluster(EXAMPLE), "main", {})
    names = {line.split("─ ")[1].split()[0] for line in text.splitlines() if "─ " in line}
    assert {name for name in names if name.startswith(("router-", "processor-", "embeddings-"))} == {
        *("router-tiny", "processor-tiny", "embeddings-vectors", "embeddings-scores")
    }
    assert "vectors computes vectors, and no answers" in text
    assert "scores computes scores, and no answers" in text


def test_what_a_model_computes_is_shown_before_its_engines_are_up() -> None:
    assembly, _ = built_assembly(read_cluster(EXAMPLE), "main")
    assert assembly.gateway is not None
    served = assembly.gateway.runner.served
    assert {name: each.model().task for name, each in served.items()} == {
        "tiny": "generate",
        "vectors": "embed",
        "scores": "score",
    }
    vectors = served["vectors"].embeddings
    assert vectors is not None
    assert (vectors.info(), vectors.refuse_answer("vectors").param) == (None, "model")
    assert served["tiny"].embeddings is None


def test_a_model_of_vectors_needs_no_chat_template(tmp_path: Path) -> None:
    prompts = json.dumps({"prompts": {"query": "query: "}}).encode()
    assembly, _ = built_assembly(with_folder(tmp_path, config_sentence_transformers=prompts), "main")
    digests = dict(assembly.directory.models.digests["vectors"])
    assert {"tokenizer.json", "config_sentence_transformers.json"} <= digests.keys()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config_sentence_transformers": b"{"}, "config_sentence_transformers.json cannot be read"),
        ({"tokenizer": None}, "has no tokenizer.json"),
    ],
)
def test_a_folder_that_cannot_be_used_is_a_mistake_at_its_key(
    files: dict[str, bytes | None], words: str, tmp_path: Path
) -> None:
    with pytest.raises(Misconfigured, match=words) as raised:
        built_assembly(with_folder(tmp_path, **files), "main")
    assert raised.value.path == "model.vectors.path"
