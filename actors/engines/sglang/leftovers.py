"""What a host leaves behind outside its folder, and how whoever outlives it removes that.

SGLang and multiprocessing make names under /dev/shm that a killed process cannot remove. A host writes each down in its
folder as early as it knows of it; its node, or the next node's sweep, reads the list and removes both.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # the kernel's own place, not a temporary file of ours
LIST = "shared-memory"


def record(folder: Path, names: set[str]) -> None:
    """Write down names under /dev/shm that would outlive the host of `folder`."""
    path = folder / LIST
    known = set(path.read_text().split()) if path.exists() else set()
    path.write_text("\n".join(sorted(known | names)))


def mapped() -> set[str]:
    """Return the names under /dev/shm that this process's group has mapped."""
    names: set[str] = set()
    group = os.getpgrp()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it ended meanwhile
            if os.getpgid(int(entry.name)) == group:
                names |= _shared((entry / "maps").read_text())
    return names


def _shared(maps: str) -> set[str]:
    found = (line.partition(f"{SHARED_MEMORY}/")[2] for line in maps.splitlines())
    return {name for name in found if name and not name.endswith(" (deleted)")}


def remove(folder: Path) -> None:
    """Remove a host's folder and the shared memory that its list names; idempotent."""
    with suppress(OSError):
        for name in (folder / LIST).read_text().split():
            if "/" not in name:
                (SHARED_MEMORY / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
