"""Print the shape of the house, from its own imports: `python -m tests.repository.shape` (`make shape`).

A folder's *rooms* are its entries, files and folders. An *arrow* is a pair of rooms of which the first imports the second.
A *floor* is a level of the arrows' condensation, where a circle of rooms is one node. An *upward* arrow lies within a
circle, against the order of its rooms: those that import most of the others stand highest.
"""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from tests.repository.sources import FILES, imports, module, nodes, text

LINES_MAX = 300
FIELDS_MIN = 14
ROOMS_MIN = 5  # of a folder that is printed

MODULES = {module(path): path for path in FILES if path.name != "__init__.py"}

Graph = dict[str, set[str]]


def graph(folder: Path) -> Graph:
    """Return which entry of a folder imports which others."""
    inside = [path for path in MODULES.values() if folder in path.parents]
    entry = {path: path.relative_to(folder).parts[0] for path in inside}
    found: Graph = {name: set() for name in entry.values()}
    for path in inside:
        targets = {MODULES[name] for name in imports(path) if name in MODULES}
        found[entry[path]] |= {entry[target] for target in targets & entry.keys()} - {entry[path]}
    return found


def reach(edges: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def upward(edges: Graph, circle: set[str]) -> int:
    """Return the number of arrows within a circle that lead against the order of its rooms."""
    order: list[str] = []
    rest = set(circle)
    while rest:
        surplus = {room: len(edges[room] & rest) - sum(room in edges[other] for other in rest) for room in rest}
        order.append(min(rest, key=lambda room: (-surplus[room], room)))
        rest.remove(order[-1])
    return sum(other in edges[room] for index, room in enumerate(order) for other in order[:index])


def figures(edges: Graph) -> str:
    reached = {room: reach(edges, room) for room in edges}
    circle = {room: frozenset({room} | {other for other in reached[room] if room in reached[other]}) for room in edges}
    above: dict[frozenset[str], set[frozenset[str]]] = {one: set() for one in circle.values()}
    for room, others in edges.items():
        above[circle[room]] |= {circle[other] for other in others} - {circle[room]}
    floor: dict[frozenset[str], int] = {}
    for one in TopologicalSorter(above).static_order():
        floor[one] = 1 + max((floor[other] for other in above[one]), default=0)
    arrows = sum(map(len, edges.values()))
    up = sum(upward(edges, set(one)) for one in floor)
    return f"{len(edges):6}{max(floor.values(), default=0):8}{arrows:8}{up:8}"


def fields(definition: ast.ClassDef) -> int:
    """Return the number of fields that a class declares, class variables apart."""
    annotated = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    return sum("ClassVar" not in ast.unparse(node.annotation) for node in annotated)


def main() -> None:
    out = sys.stdout.write
    out(f"{'folder':36}{'rooms':>6}{'floors':>8}{'arrows':>8}{'upward':>8}\n")
    for folder in sorted({parent for path in FILES for parent in path.parents} - {Path()}):
        if len(edges := graph(folder)) >= ROOMS_MIN:
            out(f"{folder!s:36}{figures(edges)}\n")
    long = sorted(((text(path).count("\n"), str(path)) for path in FILES), reverse=True)
    long = [(lines, path) for lines, path in long if lines > LINES_MAX]
    out(f"\n{len(long)} files over {LINES_MAX} lines\n")
    for lines, path in long:
        out(f"{lines:6}  {path}\n")
    classes = [
        (fields(node), f"{path}: {node.name}")
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    ]
    wide = sorted((row for row in classes if row[0] >= FIELDS_MIN), reverse=True)
    out(f"\n{len(wide)} classes of {FIELDS_MIN} fields and more\n")
    for count, name in wide:
        out(f"{count:6}  {name}\n")


if __name__ == "__main__":
    main()
