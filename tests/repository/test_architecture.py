"""The pictures of a node's tree in docs/architecture.md and README show the children that are assembled, in their order."""

from __future__ import annotations

import re
from pathlib import Path

from supervisor.engines.kinds import read_cluster
from supervisor.supervision.tree import Child, Tree, render
from tests.rig.assembly import built_assembly

ROOT = Path(__file__).parents[2]


def outline(text: str) -> list[str]:
    """Return the first line of each member of a rendered tree, up to its name."""
    lines = (re.match(r"((?:[│ ] {2})*(?:[├└]─ )?[\w-]+) {2,}\S", line) for line in text.splitlines())
    return [line[1] for line in lines if line]


def picture(page: str) -> list[str]:
    return outline((ROOT / page).read_text().partition("## The tree")[2].partition("```\n")[2].partition("```")[0])


def test_the_pictures_of_the_tree_are_those_of_the_quickstart() -> None:
    assembly, _ = built_assembly(read_cluster(ROOT / "examples" / "quickstart.toml"), "main")
    shown = outline(render(assembly.tree))
    assert picture("docs/architecture.md") == shown, "edit the picture of the tree in docs/architecture.md"
    children = [line for line in shown if line[0] in "├└"]
    in_readme = [line for line in picture("README.md") if line[0] in "├└"]
    assert in_readme == children, "edit the picture of the tree in README.md, which may leave out what is below a child"
    assert len(children) > 4


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


def test_the_table_of_rooms_names_every_engine() -> None:
    row = next(
        line
        for line in (ROOT / "docs/architecture.md").read_text().splitlines()
        if line.startswith("| `actors/engines/` |")
    )
    folders = {path.parent.name for path in ROOT.glob("actors/engines/*/__init__.py")}
    assert not [name for name in folders if f"`{name}/`" not in row], (
        "edit the row of actors/engines/ in docs/architecture.md"
    )
