"""What a node is assembled of is complete when it is returned: nothing is set afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs.exceptions import FrozenError

from actors.kit.calls import Function
from protocol.messages.cluster import Leg
from protocol.messages.operations import CheckGrammar
from supervisor.cluster.directory import Directory
from supervisor.engines.grammar_checks import accept_grammar
from supervisor.engines.kinds import read_cluster
from supervisor.node.assembly import Assembly
from tests.rig.assembly import built_assembly
from tests.rig.scratch import ROOT

FILE = f"""
[gateway]
port = 0
[model.tiny]
path = "{ROOT / "examples" / "tiny"}"
policy = "kv"
[engine.a]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""
STATE = {"draining", "follower_ranks", "address", "announce_s", "name_conflicts", "version", "load_version"}


@pytest.fixture
def assembly(tmp_path: Path) -> Assembly:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE)
    return built_assembly(read_cluster(file), "main")[0]


def refuses_every_field(value: Any, *, but: set[str]) -> None:
    for each in attrs.fields(type(value)):
        if each.name not in but and not each.name.startswith("_"):
            with pytest.raises(FrozenError):
                setattr(value, each.name, None)


def test_what_a_node_is_assembled_of_is_never_set_later(assembly: Assembly) -> None:
    refuses_every_field(assembly, but=set())
    refuses_every_field(assembly.controls, but=set())
    refuses_every_field(assembly.models["tiny"], but=set())
    refuses_every_field(assembly.controls.pools.__self__, but=set())  # type: ignore[attr-defined]  # the view of pools
    refuses_every_field(assembly.directory, but=STATE)


def test_what_changes_in_a_directory_is_its_state_alone() -> None:
    directory = Directory("main")
    for name in STATE:
        setattr(directory, name, getattr(directory, name))


def test_links_serve_what_a_worker_of_this_node_serves_a_checker_of_grammars_included() -> None:
    for file, node in (("disagg.toml", "prefill"), ("disagg.toml", "decode"), ("vision.toml", "encoder")):
        assembly, _ = built_assembly(read_cluster(ROOT / "examples" / file), node)
        assert assembly.links is not None
        for worker in assembly.directory.local.values():
            over_links = {kind: assembly.links.services[worker.engine_name, kind] for kind in worker.services}
            assert over_links == worker.services
            if worker.leg is not Leg.ENCODE:
                assert worker.services[CheckGrammar] != Function(accept_grammar), "SGLang has a checker of its own"


def test_the_services_of_an_engine_can_be_asked_through_its_worker_and_over_links_alike(assembly: Assembly) -> None:
    (worker,) = assembly.directory.local.values()
    assert assembly.links is None
    assert {kind.__name__ for kind in worker.services} >= {"WatchBlocks", "WatchLoad", "GetLoad", "CheckGrammar"}
    model = assembly.models["tiny"]
    assert model.feed is not None
    assert model.routing.policy.index is model.feed.index  # type: ignore[attr-defined]  # one for both
