"""Shared memory that outlives a host: the list of its names, and their removal.

SGLang and multiprocessing create names under /dev/shm that a killed process cannot remove. A host records each name in
a list in its folder as early as it can; the node, or the next node that starts, reads the list and removes both. A host
could write anything into its list, so only names that SGLang's libraries make and files of this user are removed. For
the tensors of requests, which come and go, the list has a pattern: the prefix of this host's names alone.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # the kernel's own place, not a temporary file of ours
LIST = "shared-memory"
LIST_CHARACTERS_MAX = 1024 * 1024
AS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
TENSORS = "sgl_shm_mm_"  # SGLang's own prefix of a request's tensors, too
PATTERN = re.compile(rf"({TENSORS}[0-9a-f]{{32}}_)\*")
MADE_BY_HOSTS = ("sglang", "sgl_", "psm_", "sem.", "torch_", "nccl-", "gloo", "mooncake", "nvshmem", "cuda.shm.")


def record(folder: Path, names: set[str]) -> None:
    """Add names under /dev/shm to the list of the host of `folder`."""
    path = folder / LIST
    recorded = set(path.read_text().split()) if path.exists() else set()
    path.write_text("\n".join(sorted(recorded | names)))


def record_tensors(folder: Path) -> str:
    """Return the prefix of the tensors of the host of `folder`, once it is in the host's list."""
    prefix = f"{TENSORS}{secrets.token_hex(16)}_"
    record(folder, {f"{prefix}*"})
    return prefix


def mapped() -> set[str]:
    """Return the names under /dev/shm that the processes of this group have mapped."""
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
    names = (line.partition(f"{SHARED_MEMORY}/")[2] for line in maps.splitlines())
    return {name for name in names if name and not name.endswith(" (deleted)")}


def remove(folder: Path | str, within: int | None = None) -> None:
    """Remove a host's folder and its listed shared memory; idempotent. `within` is the open folder around it.

    No link is followed, and neither a folder nor shared memory of another user is removed.
    """
    with suppress(OSError):
        opened = os.open(folder, AS_FOLDER, dir_fd=within)
        try:
            ours = os.fstat(opened).st_uid == os.geteuid()
            names = _listed(opened) if ours else []
        finally:
            os.close(opened)
        _remove_shared(names)
        if ours:
            shutil.rmtree(folder, ignore_errors=True, dir_fd=within)


def _listed(folder: int) -> list[str]:
    with suppress(OSError):
        opened = os.open(LIST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(opened, encoding="utf-8", errors="replace") as lines:
            return lines.read(LIST_CHARACTERS_MAX).split()
    return []


def _remove_shared(names: list[str]) -> None:
    folder = os.open(SHARED_MEMORY, AS_FOLDER)
    try:
        prefixes = tuple(match[1] for name in names if (match := PATTERN.fullmatch(name)))
        names_there = os.listdir(folder) if prefixes else []  # noqa: PTH208  # an open folder
        tensors = [name for name in names_there if name.startswith(prefixes)]
        for name in (*names, *tensors):
            with suppress(OSError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if ours and "/" not in name and name.startswith(MADE_BY_HOSTS):
                    os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)
