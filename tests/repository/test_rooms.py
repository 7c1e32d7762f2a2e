"""The order of the rooms: no import leads to the same level or up, and some rooms may import little at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repository.test_rules import FILES, imports, module

LEVELS = (  # from the lowest: a room imports only rooms of lower levels; a file may be a room
    ("protocol", "supervisor/__init__.py", "supervisor/files", "supervisor/sockets"),
    ("supervisor/printable.py", "supervisor/version.py", "supervisor/deadlines.py"),
    ("protocol/strict", "actors/kit", "supervisor/supervision"),
    ("protocol/dialects", "actors/engines", "actors/vision", "supervisor/links"),
    ("protocol/openapi", "actors/text", "actors/routing", "supervisor/threads"),
    ("actors/engines/sglang", "actors/engines/simulated"),
    (
        *("actors", "actors/engines/sglang/host", "actors/media_decoder"),
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
        *("protocol.errors", "protocol.messages", "protocol.operations"),
        *("supervisor.supervision.events", "supervisor.threads.queued_writer"),
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


def imported(path: Path) -> set[Path]:
    """Return the files of ours that a file imports, wherever in it."""
    return {MODULES[name] for name in imports(path) if name in MODULES} - {path}


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_no_import_leads_to_the_same_level_or_up(path: Path) -> None:
    own = room(path)
    assert own, f"{path} lies in no room: add its folder to LEVELS in this file"
    for other in imported(path):
        assert room(other) == own or LEVEL_OF[room(other)] < LEVEL_OF[own], f"{own} may not import {room(other)}"


def test_no_two_files_import_each_other() -> None:
    pairs = {(path, other) for path in PRODUCT for other in imported(path)}
    assert not {pair for pair in pairs if pair[::-1] in pairs}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_room_imports_only_what_the_table_allows(name: str) -> None:
    for path in (module_path for module_path in PRODUCT if room(module_path) == name):
        names = {module(other) for other in imported(path) if room(other) != name}
        assert all(any(each == may or each.startswith(f"{may}.") for may in ALLOWED[name]) for each in names), names


def test_every_room_of_the_table_is_there() -> None:
    assert {room(path) for path in PRODUCT} - {""} == LEVEL_OF.keys()
