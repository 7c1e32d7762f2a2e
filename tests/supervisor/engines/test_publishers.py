"""The publishers of a node: one an engine, served under its name, and no engine's child."""

from __future__ import annotations

from protocol.messages.engine import WatchLoad
from protocol.messages.kv_events import WatchBlocks
from supervisor.engines.kinds import read_cluster
from supervisor.engines.publishers import engine_publisher
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Tree
from tests.rig.assembly import built_assembly, built_runtime
from tests.rig.scratch import ROOT


def test_each_engine_has_a_publisher_that_other_nodes_may_ask() -> None:
    assembly, _ = built_assembly(read_cluster(ROOT / "examples" / "disagg.toml"), "decode")
    (tree,) = [child for child in assembly.tree.children if child.name == "publishers"]
    assert isinstance(tree, Tree)
    engines = list(assembly.engines)
    assert [child.name for child in tree.children] == [f"events-{name}" for name in engines]
    assert tree.restarts_max is None, "it costs the node nothing"
    assert assembly.links is not None
    assert {(name, kind) for name in engines for kind in (WatchBlocks, WatchLoad)} <= assembly.links.services.keys()


def test_two_engines_are_published_under_lives_of_their_own() -> None:
    runtime = built_runtime()
    children, served = zip(*(engine_publisher(runtime, name, Registration()) for name in "ab"), strict=True)
    assert len({child.args[2].blocks.life for child in children}) == 2
    assert served[0]["a", WatchBlocks] is served[0]["a", WatchLoad] is not served[1]["b", WatchLoad]
