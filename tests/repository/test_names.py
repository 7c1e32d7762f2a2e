"""One public class name, one meaning: a stranger who searches for a class finds one definition."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tests.repository.sources import FILES, tree

TWICE_MAX = 7
"""Names that two files may define, such as the parts that every dialect has under the same name."""


def defined(path: Path) -> set[str]:
    """Return the public classes and the type aliases that a file defines at its top."""
    classes = {node.name for node in tree(path).body if isinstance(node, ast.ClassDef)}
    assigned = [node for node in tree(path).body if isinstance(node, ast.AnnAssign)]
    aliases = {ast.unparse(node.target) for node in assigned if ast.unparse(node.annotation) == "TypeAlias"}
    return {name for name in classes | aliases if not name.startswith("_")}


def test_few_public_class_names_have_two_definitions() -> None:
    places = defaultdict(list)
    for path in (path for path in FILES if path.parts[0] != "bench"):
        for name in defined(path):
            places[name].append(path)
    twice = [f"{name}: {', '.join(map(str, paths))}" for name, paths in sorted(places.items()) if len(paths) > 1]
    if len(twice) > TWICE_MAX:
        pytest.fail("\n".join(twice), pytrace=False)
