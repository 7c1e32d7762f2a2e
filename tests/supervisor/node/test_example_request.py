"""The request that a node proposes is one that its first model answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor.engines.kinds import load_cluster
from supervisor.node.example_request import EXAMPLES, example_request

FILE = """
[model.first]
path = "{tiny}"
[engine.first-0]
model = "first"
kind = "simulated"
kv_tokens_max = 4096
task = "{task}"
[model.other]
path = "{tiny}"
[engine.other-0]
model = "other"
kind = "simulated"
kv_tokens_max = 4096
"""
TINY = Path(__file__).parents[3] / "examples" / "tiny"


@pytest.mark.parametrize(
    ("task", "path", "field"),
    [
        ("generate", "/v1/chat/completions", "messages"),
        ("embed", "/v1/embeddings", "input"),
        ("score", "/v1/rerank", "documents"),
    ],
)
def test_the_example_is_of_the_first_models_task(task: str, path: str, field: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE.format(tiny=TINY, task=task))
    proposed, body = example_request(load_cluster(file).cluster)
    read = json.loads(body)
    assert (proposed, read["model"], field in read) == (path, "first", True)
    assert len({path for path, _ in EXAMPLES.values()}) == 3
