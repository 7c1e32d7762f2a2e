"""The sentences of errors: only those that clients get in other words may name what is inside the cluster."""

from __future__ import annotations

import ast

from protocol.errors import ERRORS_BY_CODE
from tests.repository.sources import FILES, nodes, refuse

# Errors that are shown to clients as they are.
SHOWN = {error.__name__ for error in ERRORS_BY_CODE.values() if error.outline is None}

INSIDE = {"address", "directory", "endpoint", "engine", "engine_name", "folder", "full_name", "host", "node", "worker"}
"""What names a node, an engine, a machine or a folder, where it stands in a sentence."""

# Files whose errors only operators get, or other nodes.
OPERATORS = (
    "actors/engines/adapter_table.py",
    "actors/engines/host/adapters.py",
    "actors/engines/sglang/host/adapters.py",
    "actors/engines/sglang/host/checkpoint.py",
    "supervisor/cli/",
    "supervisor/cluster/operations.py",
    "supervisor/control/",
    "supervisor/engines/sglang/ranks.py",
    "supervisor/node/",
)


def test_no_error_that_clients_are_shown_names_what_is_inside() -> None:
    refuse(
        f"{path}:{node.lineno}: {node.func.id} names {', '.join(sorted(named))}: clients get this sentence"
        for path in FILES
        if path.parts[0] in {"actors", "supervisor"} and not str(path).startswith(OPERATORS)
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHOWN and node.args
        if (named := INSIDE & _names(node.args[0]))
    )


def _names(sentence: ast.expr) -> set[str]:
    """Return the names and attributes that stand in a sentence."""
    parts = [part for part in ast.walk(sentence) if isinstance(part, ast.FormattedValue)]
    inside = [each for part in parts for each in ast.walk(part)]
    return {each.attr for each in inside if isinstance(each, ast.Attribute)} | {
        each.id for each in inside if isinstance(each, ast.Name)
    }
