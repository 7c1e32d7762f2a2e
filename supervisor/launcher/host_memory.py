"""The memory that processes started here may still take: the machine's, or less where a control group has a limit.

A container has a group of its own. Beyond the limit of a group the kernel kills a process of it, however much memory
the machine has left. Files that are cached count as used there, but are dropped when memory is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path("/")


@frozen
class _Version:
    """The names of one version of the kernel's control groups."""

    mount: str
    limit: str
    used: str
    cached: str  # in `memory.stat`


V1 = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = ROOT) -> int | None:
    """Return the memory that is available to new processes here; None if it is unknown."""
    return min([*_of_machine(root), *_of_groups(root)], default=None)


def _of_machine(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_groups(root: Path) -> Iterator[int]:
    """Yield the rest of each group with a limit: the process's own and those around it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = V1 if controllers else V2
        mount = root / version.mount
        own = mount / path.lstrip("/")
        # In a container the path may be the machine's, while its own group is where the others are mounted.
        for folder in (own, *own.parents) if own.is_dir() else (mount,):
            if not folder.is_relative_to(mount):
                break
            yield from _of_group(folder, version)


def _of_group(folder: Path, version: _Version) -> Iterator[int]:
    limit, used = _text(folder / version.limit).strip(), _text(folder / version.used).strip()
    if limit.isdigit() and used.isdigit():  # "max" is none
        rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
        cached = next((int(row[1]) for row in rows if row[0] == version.cached), 0)
        yield max(0, int(limit) - max(0, int(used) - cached))


def _text(path: Path) -> str:
    """Return the text of a file of the kernel, empty if there is none."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
