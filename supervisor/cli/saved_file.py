"""A file of an engine, asked for part by part and saved where an operator wants it."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from attrs import evolve

from protocol.errors import BadRequest
from protocol.messages.engine_files import FILE_NAME, ReadFile
from protocol.messages.kind import Message

AskForFields: TypeAlias = Callable[[Message], Awaitable[object]]
"""Asks the engine; returns the fields of its result."""


async def saved_file(request: ReadFile, ask: AskForFields, to: Path) -> dict[str, object]:
    """Save a file at `to`, or under its own name in the folder `to`, and return where.

    A file that was there is replaced once all of the new one is there. Raises `ValueError` for parts that do not make
    a file, `OSError` if it cannot be saved.
    """
    if not FILE_NAME.fullmatch(request.name):  # it may become the name of a file here
        raise BadRequest(f"there is no file {request.name!r}: see list-files", param="name")
    place = to / request.name if to.is_dir() else to  # noqa: ASYNC240  # a command waits for its disk
    part = place.with_name(f".{place.name}.part")
    try:
        with part.open("wb") as file:
            while (size := _append(file.write, await ask(evolve(request, offset=file.tell())))) > file.tell():
                pass
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
    return {"saved": str(place), "bytes": size}


def _append(write: Callable[[bytes], int], fields: object) -> int:
    """Write a part of a file, and return the size of the whole; raises `ValueError` for a part that is none."""
    if isinstance(fields, dict) and isinstance(size := fields.get("size"), int):
        data = b64decode(str(fields.get("data")), validate=True)
        if write(data) or not size:
            return size
    raise ValueError("this is no part of a file")
