"""The KV caches that prefills hold for decodes of other processes: a file for each, which the decode takes away."""

import os
import tempfile
from pathlib import Path
from uuid import uuid4


def folder() -> Path:
    """Return the folder that all processes share."""
    return Path(os.environ.get("ESPALIER_FAKE_TRTLLM_FOLDER") or tempfile.gettempdir())


def hold(known: int, rank: int | None = None) -> bytes:
    """Hold a state of a rank, with what its model knows; return what a decode is to be given beside the rank."""
    name = f"trtllm-{uuid4().hex}"
    (folder() / name).write_text(f"{os.getpid()} {rank} {known}")
    return name.encode()


def is_held(state: bytes) -> bool:
    """Whether no decode has taken a state yet."""
    return (folder() / state.decode()).exists()


def take(state: bytes, rank: int | None = None) -> int | None:
    """Take a state of a rank, and return what is known in it.

    None if it is not held any more, or by a process that has ended, or another rank.
    """
    path = folder() / Path(state.decode()).name
    try:
        process, holder, known = path.read_text().split()
        if holder != str(rank):
            return None
        path.unlink()
        os.kill(int(process), 0)
    except (OSError, ValueError):
        return None
    return int(known)


def free(state: bytes) -> None:
    """Hold a state no more."""
    (folder() / state.decode()).unlink(missing_ok=True)
