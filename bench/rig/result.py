"""The result of a bench as one JSON document, which `python -m bench report` turns into a page.

Every command writes the same form: the measurement and how to repeat it, then *figures*, the tables of a report. A
command may have keys of its own beside them. A repeated measurement is a list of all its values, never a mean.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

GIT_WITHIN_S = 10.0

Cell = str | float | list[float] | None  # a list has the values of repeated measurements


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of cells; the first cell of a row is its name, and the unit of a column stands in its head."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The part that every document has."""

    schema: str
    title: str
    command: Sequence[str]
    begun_at: str
    versions: dict[str, str | None]
    machine: dict[str, str | int | None]
    notes: Sequence[str] = ()
    figures: Sequence[Table] = ()
    samples: Any = None  # what the figures are computed from, in the command's own form


def about(words: Sequence[str], begun: datetime) -> dict[str, object]:
    """Return what is needed to repeat a bench: its command, versions and machine. Secrets are masked by the caller."""
    commit, busy = surroundings()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "command": ["python", "-m", "bench", *words],
        "begun_at": begun.isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("espalier", "trio", "h11", "sglang")},
            "commit": commit,
        },
        "machine": {
            "system": platform.platform(),
            "architecture": platform.machine(),
            "processor": _processor(),
            "cores": cores,
            "load before": busy,
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout, or not installed
        return None


@cache
def surroundings() -> tuple[str | None, str | None]:
    """Return the commit and how busy the machine is, both when this is first called: before a bench begins.

    A bench takes long: at its end the checkout may be another, and the machine is busy with the bench.
    """
    try:
        busy = f"{os.getloadavg()[0]:.1f}"
    except OSError:
        busy = None
    return _commit(), busy


def _commit() -> str | None:
    """Return the commit of this checkout, with `-dirty` where files differ from it; None outside of one."""
    words = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=GIT_WITHIN_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name that the processor has of itself, None where there is none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def check_writable(path: Path) -> None:
    """Raise `OSError` if a document cannot be written there: known before a bench of an hour, not after it."""
    place = path.resolve()
    existed = place.exists()
    place.open("ab").close()
    if not existed:
        place.unlink()  # an empty file would look like the document of a bench that has not failed


def write(path: Path, document: object) -> None:
    """Write a document as indented JSON: all of it, or nothing if this process ends meanwhile."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    place = path.resolve()  # what a link names is replaced, and not the link
    if place.exists() and not place.is_file():
        place.write_bytes(text)  # a pipe, or a terminal
        return
    part = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        part.write_bytes(text)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


def write_document(
    path: Path,
    words: Sequence[str],
    begun: datetime,
    *,
    title: str,
    notes: Sequence[str],
    figures: Sequence[Table],
    samples: object,
) -> None:
    """Write the document of a command with its measurements as `samples`; the first of its words is its name."""
    document = {
        "schema": f"espalier.bench.{words[0]}/1",
        "title": title,
        **about(words, begun),
        "notes": notes,
        "figures": figures,
        "samples": samples,
    }
    write(path, document)


def read(path: Path) -> Result:
    """Read the part that every document has; raises `OSError`, or `msgspec.DecodeError` with the place in it."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


# Statistics -------------------------------------------------------------------------------


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ordered samples, of which there must be one; linear between the two nearest."""
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
