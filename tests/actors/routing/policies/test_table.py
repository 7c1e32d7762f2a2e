"""Routing policies: a new one costs a file and a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.routing.policies.least_loaded import least_loaded
from actors.routing.policies.table import POLICIES, PolicyContext
from supervisor.config.load import FileMistakes
from supervisor.engines.kinds import read_cluster
from tests.rig.scratch import ROOT, scratch

TINY = ROOT / "examples" / "tiny"
CLUSTER = """
[gateway]
port = 0
[model.tiny]
path = "{folder}"
policy = "{policy}"
"""
ENGINE = """
[engine.{name}]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""

DUMMY = '''
"""The policy `by_prompt`: requests with the same first token go to the same worker, while that one has room."""

from __future__ import annotations

from actors.routing.candidates import Candidates, Choice
from protocol.messages.generation import Generate


def by_prompt(request: Generate, candidates: Candidates) -> Choice | None:
    """Return the worker to ask."""
    loads = sorted(candidates, key=lambda load: load.name)
    return Choice(loads[request.tokens[0] % len(loads)]) if loads else None
'''

ROUTED = """
from pathlib import Path

import trio
from actors.routing.policies.table import POLICIES
from protocol.messages.generation import Generate, Sampling
from supervisor.engines.kinds import read_cluster
from supervisor.supervision.registration import Registration
from tests.rig.assembly import built_assembly

async def main():
    assembly, _ = built_assembly(read_cluster(Path({file!r})), "main")
    routing = assembly.routers.routings["tiny"]
    assert routing.policy is POLICIES["by_prompt"](assembly.routers.policies["tiny"])
    chosen = []
    with assembly.engines["a"].publish(Up()), assembly.engines["b"].publish(Up()):
        for first in (0, 1, 2, 1, 1):
            route = routing.choose(Generate("0" * 32, [first, 7], Sampling(3)))
            chosen.append(route.name)
            route.end()
    print(*chosen)

class Up:
    info = None

trio.run(main)
"""


def write(folder: Path, policy: str) -> Path:
    file = folder / "cluster.toml"
    file.write_text(CLUSTER.format(folder=TINY, policy=policy) + ENGINE.format(name="a") + ENGINE.format(name="b"))
    return file


def test_the_policy_of_a_model_is_named_in_its_section(tmp_path: Path) -> None:
    assert read_cluster(write(tmp_path, "least_loaded")).model["tiny"].policy == "least_loaded"
    assert POLICIES["least_loaded"](PolicyContext(lambda: 0.0, lambda: 0.0)) is least_loaded
    with pytest.raises(FileMistakes, match=r'model\.tiny\.policy: must be .*least_loaded.*, got "by_prompt"'):
        read_cluster(write(tmp_path, "by_prompt"))


def test_a_policy_is_added_by_a_file_and_a_row(tmp_path: Path) -> None:
    copy = scratch(tmp_path)
    copy.add("actors/routing/by_prompt.py", DUMMY)
    copy.insert("actors/routing/policies/table.py", '    "least_loaded"', '"by_prompt": stateless(by_prompt),\n')
    copy.insert(
        "actors/routing/policies/table.py",
        "from actors.routing.policies.least_loaded import least_loaded",
        "from actors.routing.by_prompt import by_prompt\n",
    )
    assert copy.touched == {"actors/routing/by_prompt.py", "actors/routing/policies/table.py"}

    file = write(tmp_path, "by_prompt")
    code, shown = copy.run("-m", "supervisor", "--check", str(file))
    assert (code, "chosen by by_prompt" in shown) == (0, True), shown
    names = copy.program(ROUTED.format(file=str(file))).split()
    assert names == ["main/a", "main/b", "main/a", "main/b", "main/b"]
