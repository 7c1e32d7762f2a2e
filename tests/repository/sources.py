"""The product's files as the rules of the repository read them: their syntax trees, imports and modules."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "actors", "supervisor", "bench")
FILES = [path.relative_to(ROOT) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def refuse(broken: Iterable[str]) -> None:
    """Fail with all these lines, each a file and the reason, if there are any."""
    if lines := sorted(broken):
        pytest.fail("\n".join(lines), pytrace=False)


@cache
def text(path: Path) -> str:
    return (ROOT / path).read_text()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


@cache
def imports(path: Path, *, top: bool = False) -> frozenset[str]:
    """Return every module that a file imports, and its imports from packages of ours, anywhere in it or at its top."""
    return frozenset(_imports(path, tree(path).body if top else nodes(path)))


def _imports(path: Path, among: Iterable[ast.AST]) -> Iterator[str]:
    package = path.parent.parts
    for node in among:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            if (ROOT / module.replace(".", "/")).is_dir():
                yield from (f"{module}.{alias.name}" for alias in node.names)


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def foreign(path: Path) -> set[str]:
    return roots(path) - set(sys.stdlib_module_names) - {"__future__"}


def theirs(path: Path, modules: set[str]) -> set[str]:
    """Return the imports of a file from these modules and packages, without those that it is or belongs to."""
    others = tuple(f"{each}." for each in modules if not f"{module(path)}.".startswith(f"{each}."))
    return {name for name in imports(path) if f"{name}.".startswith(others)}
