"""The picture of a node's tree in docs/architecture.md shows the children that are assembled, in their order."""

from __future__ import annotations

import re
from pathlib import Path

from supervisor.engines.kinds import read_cluster
from supervisor.supervision.tree import Child, Tree, render
from tests.rig.assembly import built_assembly

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def outline(text: str) -> list[str]:
    """Return the first line of each member of a rendered tree, up to its name."""
    lines = (re.match(r"((?:[│ ] {2})*(?:[├└]─ )?[\w-]+) {2,}\S", line) for line in text.splitlines())
    return [line[1] for line in lines if line]


def test_the_picture_of_the_tree_is_that_of_the_quickstart() -> None:
    picture = PAGE.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    assembly, _ = built_assembly(read_cluster(ROOT / "examples" / "quickstart.toml"), "main")
    assert outline(picture) == outline(render(assembly.tree)), "edit the picture of the tree in docs/architecture.md"
    assert len(outline(picture)) > 6


def test_a_node_with_links_has_the_children_of_the_page_in_their_order() -> None:
    assembly, _ = built_assembly(read_cluster(ROOT / "examples" / "spanning.toml"), "first")
    names = [child.name for child in assembly.tree.children]
    assert names[:2] == ["gateway", "links"]
    assert any(name.startswith("processor-") for name in names[2:])


def test_what_other_nodes_and_clients_see_first_starts_first_and_stops_last() -> None:
    assembly, _ = built_assembly(read_cluster(ROOT / "examples" / "spanning.toml"), "first")
    needs = assembly.tree.transitive_needs()
    assert needs["gateway"] == frozenset()
    assert needs["links"] == {"gateway"}
    others = [child for child in assembly.tree.children if child.name not in {"gateway", "links"}]
    assert all(isinstance(child, Child | Tree) and needs[child.name] >= {"gateway", "links"} for child in others)
