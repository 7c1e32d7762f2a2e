"""A kept result: the document of a bench, with its samples by the sides that were compared."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from attrs import frozen

from bench.cost.sample import Sample
from bench.rig.result import Cell, Result, Table
from bench.rig.result import read as read_result
from bench.versus.ratios import ROUNDS_NOTE

RESULTS = Path(__file__).parents[1] / "results"
OURS, THEIRS = "ours", "theirs"


class Sampled(msgspec.Struct):
    """The samples of a document: of `versus` by sides, of `cost` a list; of other commands something else."""

    schema: str
    samples: Any = None


@frozen
class Kept:
    """One result; of `cost`, all samples are ours."""

    name: str
    result: Result
    samples: dict[str, list[Sample]]

    def rows(self, title: str) -> Sequence[Sequence[Cell]]:
        """Return the rows of its table with this title; raises `KeyError` without one."""
        for figure in self.result.figures:
            if isinstance(figure, Table) and figure.title == title:
                return figure.rows
        raise KeyError(title)

    def sides(self, api: str, clients: int, tokens: int) -> tuple[list[Sample], list[Sample]]:
        """Return the peer's samples and ours of the loads in which ours was asked by this API."""
        ours = self.samples.get(OURS, [])
        theirs = self.samples.get(THEIRS, [])
        chosen = [
            place
            for place, sample in enumerate(ours)
            if (sample.load.api, sample.load.clients, sample.load.output_tokens) == (api, clients, tokens)
        ]
        return [theirs[place] for place in chosen if theirs], [ours[place] for place in chosen]


def read(path: Path) -> Kept:
    """Read one result; raises `OSError`, or `msgspec.DecodeError` with the place in it."""
    sampled = msgspec.json.decode(path.read_bytes(), type=Sampled)
    samples: dict[str, list[Sample]] = {}
    if sampled.schema.startswith("espalier.bench.versus/"):
        samples = msgspec.convert(sampled.samples, dict[str, list[Sample]])
    elif sampled.schema.startswith("espalier.bench.cost/"):
        samples = {OURS: msgspec.convert(sampled.samples, list[Sample])}
    return Kept(path.stem, read_result(path), samples)


def read_all(folder: Path = RESULTS) -> dict[str, Kept]:
    """Return every result of a folder by its name."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.json"))}


def origin(kept: Kept) -> str:
    """Return when, on which machine, of which versions and by which command a result was taken, and what to doubt."""
    machine, versions = kept.result.machine, kept.result.versions
    parts = [
        kept.result.begun_at[:10],
        f"{machine.get('cores')} cores",
        *([f"load {machine['load before']} before"] if machine.get("load before") else []),
        *(str(machine[key]) for key in ("processor", "architecture") if machine.get(key)),
        *(
            f"{name} {version}"
            for name, version in versions.items()
            if version and name in {"python", "sglang", "commit"}
        ),
    ]
    doubts = [note for note in kept.result.notes if not note.startswith(ROUNDS_NOTE)]
    return "; ".join((f"{', '.join(parts)}: `{shlex.join(kept.result.command)}`", *doubts))
