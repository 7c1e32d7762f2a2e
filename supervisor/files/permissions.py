"""Permissions of files with secrets: files writable by others are refused, readable ones get a warning."""

from __future__ import annotations

import stat
from pathlib import Path

from supervisor.files import reading


def writable_by_others(path: Path) -> str | None:
    """Return the reason not to trust a file: other users may write it, or replace it in its folder; else None.

    Raises `OSError` if the file does not exist.
    """
    reading.record_path(path)
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        return f"every user of this host may write {path}: chmod o-w {path}"
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"every user of this host may replace {path}: chmod o-w {folder}"
    return None


def readable_by_others(path: Path) -> str | None:
    """Return a warning if all users may read a file, or its group may write it; else None. Raises `OSError`."""
    reading.record_path(path)
    mode = path.stat().st_mode
    if mode & stat.S_IROTH:
        return f"every user of this host may read {path}: chmod o-r {path}"
    if mode & stat.S_IWGRP:
        return f"the group of {path} may write it: chmod g-w {path}"
    return None
