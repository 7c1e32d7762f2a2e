"""The rooms of the house: no import leads to the same floor or up, and what some rooms may import at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repository.test_rules import FILES, imports, module

FLOORS = (  # from the ground up: the rooms of a floor import those of lower floors alone; a file may be a room
    ("protocol", "supervisor/__init__.py", "supervisor/files", "supervisor/sockets"),
    ("supervisor/printable.py", "supervisor/version.py", "supervisor/deadlines.py"),
    ("protocol/strict", "actors/kit", "supervisor/supervision"),
    ("protocol/dialects", "actors/engines", "supervisor/links"),
    ("protocol/openapi", "actors/text", "actors/routing", "supervisor/threads"),
    ("actors/engines/sglang", "actors/engines/simulated"),
    ("actors", "supervisor/processes", "supervisor/telemetry", "actors/engines/sglang/host"),
    ("supervisor/config", "supervisor/observers.py", "supervisor/runtime.py"),
    ("supervisor/gateway", "supervisor/cluster"),
    ("supervisor/engines",),
    ("supervisor/control",),
    ("supervisor/node", "supervisor/cli"),
    ("supervisor/launcher",),
    ("supervisor/__main__.py",),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

WALLS = {  # rooms that could be published by themselves, with these modules of ours beside them and nothing else
    "supervisor/supervision": {"protocol.errors"},
    "supervisor/processes": {"protocol.errors", "supervisor.threads.queued_writer"},
    "supervisor/telemetry": {
        *("protocol.errors", "protocol.messages"),
        *("supervisor.supervision.events", "supervisor.threads.queued_writer"),
    },
    "supervisor/links": {"protocol", "actors.kit", "supervisor.printable"},
    "supervisor/sockets": set(),
    "supervisor/files": set(),
}

PRODUCT = [path for path in FILES if path.parts[0] != "bench" and len(path.parts) > 1]
MODULES = {module(path): path for path in PRODUCT}


def room(path: Path) -> str:
    """Return the room of a file: the longest row of the table that it lies below."""
    rooms = [name for name in FLOOR_OF if str(path) == name or str(path).startswith(f"{name}/")]
    return max(rooms, key=len, default="")


def imported(path: Path) -> set[Path]:
    """Return the files of ours that a file imports, wherever in it."""
    return {MODULES[name] for name in imports(path) if name in MODULES} - {path}


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_no_import_leads_to_the_same_floor_or_up(path: Path) -> None:
    own = room(path)
    assert own, f"{path} lies in no room: add its folder to FLOORS in this file"
    for other in imported(path):
        assert room(other) == own or FLOOR_OF[room(other)] < FLOOR_OF[own], f"{own} may not import {room(other)}"


def test_no_two_files_import_each_other() -> None:
    pairs = {(path, other) for path in PRODUCT for other in imported(path)}
    assert not {pair for pair in pairs if pair[::-1] in pairs}


@pytest.mark.parametrize("name", WALLS)
def test_a_room_imports_only_what_its_walls_allow(name: str) -> None:
    for path in (module_path for module_path in PRODUCT if room(module_path) == name):
        names = {module(other) for other in imported(path) if room(other) != name}
        assert all(any(each == may or each.startswith(f"{may}.") for may in WALLS[name]) for each in names), names


def test_every_room_of_the_table_is_there() -> None:
    assert {room(path) for path in PRODUCT} - {""} == FLOOR_OF.keys()
