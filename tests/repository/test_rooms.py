"""The order of the rooms: no import leads to the same level or up, and some rooms may import little at all."""

from __future__ import annotations

from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.repository.sources import FILES, imports, module, refuse

ENGINE_KINDS = tuple(
    f"actors/engines/{path.parent.name}" for path in FILES if path.match("supervisor/engines/*/section.py")
)
ENGINE_HOSTS = tuple(str(path.parent) for path in FILES if path.match("actors/engines/*/host/__init__.py"))
LEVELS = (  # from the lowest: a room imports only rooms of lower levels; a file may be a room
    ("protocol", "supervisor/__init__.py", "supervisor/files", "supervisor/sockets"),
    ("supervisor/printable.py", "supervisor/version.py", "supervisor/deadlines.py", "supervisor/standard_streams.py"),
    ("protocol/strict", "actors/kit", "supervisor/supervision"),
    ("protocol/dialects", "actors/engines", "actors/media", "supervisor/links"),
    ("protocol/openapi", "actors/text", "actors/routing", "supervisor/threads"),
    ENGINE_KINDS,
    (
        *("actors", *ENGINE_HOSTS, "actors/media/decoder"),
        *("supervisor/processes", "supervisor/telemetry", "supervisor/tensors"),
    ),
    ("supervisor/config", "supervisor/observers.py", "supervisor/runtime.py"),
    ("supervisor/gateway", "supervisor/cluster", "supervisor/media"),
    ("supervisor/engines",),
    ("supervisor/control",),
    ("supervisor/node", "supervisor/cli"),
    ("supervisor/launcher",),
    ("supervisor/command_line.py",),
    ("supervisor/__main__.py",),
)
LEVEL_OF = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}

ALLOWED = {  # of rooms that could be published by themselves, with these modules of ours and no others
    "supervisor/supervision": {"protocol.errors"},
    "supervisor/processes": {"protocol.errors", "supervisor.threads.queued_writer"},
    "supervisor/telemetry": {
        *(
            "protocol.errors",
            "protocol.messages.engine",
            "protocol.messages.generation",
            "protocol.messages.operations",
            "protocol.trace",
        ),
        *("actors.kit.spans", "supervisor.supervision.events", "supervisor.threads.queued_writer"),
    },
    "supervisor/links": {"protocol", "actors.kit", "supervisor.printable"},
    "supervisor/tensors": {"protocol", "actors.engines.shared_tensors", "supervisor.links"},
    "supervisor/sockets": set(),
    "supervisor/files": set(),
}

PRODUCT = [path for path in FILES if path.parts[0] != "bench" and len(path.parts) > 1]
MODULES = {module(path): path for path in PRODUCT}


def room(path: Path) -> str:
    """Return the room of a file: the longest row of the table that it lies below."""
    rooms = [name for name in LEVEL_OF if str(path) == name or str(path).startswith(f"{name}/")]
    return max(rooms, key=len, default="")


ROOM_OF = {path: room(path) for path in PRODUCT}


@cache
def imported(path: Path) -> set[Path]:
    """Return the files of ours that a file imports, wherever in it."""
    return {MODULES[name] for name in imports(path) if name in MODULES} - {path}


def test_no_import_leads_to_the_same_level_or_up() -> None:
    homeless = [path for path in PRODUCT if not ROOM_OF[path]]
    assert not homeless, "add the folder of each to LEVELS in this file"
    pairs = [(path, ROOM_OF[path], ROOM_OF[other]) for path in PRODUCT for other in imported(path)]
    refuse(
        f"{path}: {own} may not import {other}"
        for path, own, other in pairs
        if other != own and LEVEL_OF[other] >= LEVEL_OF[own]
    )


def neighbours(path: Path, other: Path) -> tuple[Path, Path]:
    """Return the two entries of the deepest common folder of two files that contain them, each a file or a folder."""
    depth = next(depth for depth, (a, b) in enumerate(zip(path.parts, other.parts, strict=False)) if a != b)
    return Path(*path.parts[: depth + 1]), Path(*other.parts[: depth + 1])


def test_the_files_and_folders_of_a_folder_import_each_other_in_no_circle() -> None:
    """A folder counts as one room here, so that files in it and beside it cannot depend on each other."""
    graph: dict[Path, set[Path]] = {}
    for path in PRODUCT:
        for entry, other in (neighbours(path, target) for target in imported(path)):
            if other.name != "__init__.py":
                graph.setdefault(entry, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(map(str, error.args[1])), pytrace=False)


def test_a_room_imports_only_what_the_table_allows() -> None:
    refuse(
        f"{path} imports {other}"
        for path in PRODUCT
        for other in imported(path)
        if ROOM_OF[other] != (own := ROOM_OF[path])
        and own in ALLOWED
        and not f"{module(other)}.".startswith(tuple(f"{name}." for name in ALLOWED[own]))
    )


def test_every_room_of_the_table_is_there() -> None:
    assert {*ROOM_OF.values()} - {""} == LEVEL_OF.keys()
