"""The record of a mixture of experts for a reader: balancedness, a text, a picture, and the numbers as JSON.

The JSON has the form of SGLang's initial layouts, so that a record can be the `layout` of an engine's next start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Protocol

from attrs import define, field

from protocol.errors import BadRequest, Overloaded
from protocol.messages.experts import ExpertLayer, ExpertRecord

COLUMNS_MAX = 128  # of the text: several experts share a digit where there are more
CELL = 10  # the side of an expert in the picture, in pixels
MARGIN = 40
COLOURS = (68, 1, 84), (33, 145, 140), (253, 231, 37)  # dark to light, as colour-blind readers can tell them apart

Counts = Sequence[Sequence[int]]  # the tokens of each expert, by layer


class Files(Protocol):
    """Keeps files that can be listed."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""


@define
class RecordState:
    """The legal order of an engine's operations; SGLang says nothing of a wrong one, and answers with zeros."""

    _recording: bool = field(init=False, default=False)
    _recorded: bool = field(init=False, default=False)

    @property
    def recording(self) -> bool:
        """Whether a record runs."""
        return self._recording

    def start(self) -> None:
        """Begin a record; raises `Overloaded` while one runs, whose numbers would be lost."""
        if self._recording:
            raise Overloaded("a record runs already: dump-expert-record returns it, stop-expert-record ends it")
        self._recording = self._recorded = True

    def stop(self) -> None:
        """End a record; raises `BadRequest` if none runs."""
        if not self._recording:
            raise BadRequest("no record runs: start-expert-record begins one")
        self._recording = False

    def check_dump(self) -> None:
        """Raise `BadRequest` if there is no record."""
        if not self._recorded:
            raise BadRequest("nothing has been recorded since the last dump: start-expert-record begins a record")

    def dumped(self) -> None:
        """Forget the record, which goes on if it was not stopped."""
        self._recorded = self._recording


def balancedness(counts: Sequence[int]) -> float:
    """Return the mean divided by the maximum; 1 if there is nothing to share."""
    most = max(counts, default=0)
    return round(sum(counts) / len(counts) / most, 4) if most else 1.0


def record_of(counts: Counts, steps: int, files: Sequence[str], ranks: int = 1) -> ExpertRecord:
    """Return a record; with several `ranks`, each has an equal share of the experts in their order."""
    layers = tuple(_layer(number, row, ranks) for number, row in enumerate(counts) if any(row))
    return ExpertRecord(steps, sum(map(sum, counts)), layers, tuple(files), "\n".join(_text(counts)))


def _layer(number: int, row: Sequence[int], ranks: int) -> ExpertLayer:
    each = len(row) // ranks
    shares = tuple(sum(row[start : start + each]) for start in range(0, len(row), each)) if ranks > 1 else ()
    busiest = max(range(len(row)), key=row.__getitem__)
    between = balancedness(shares) if shares else None
    return ExpertLayer(number, sum(row), balancedness(row), busiest, shares, between)


def write_files(files: Files, name: str, counts: Counts) -> tuple[str, ...]:
    """Write the numbers and the picture of a record; return the names of the files."""
    names = f"{name}.json", f"{name}.svg"
    files.write(names[0], json.dumps({"logical_count": [list(row) for row in counts]}).encode())
    files.write(names[1], "".join(_picture(counts)).encode())
    return names


def _text(counts: Counts) -> Iterator[str]:
    """Yield a line for each layer that has experts, and a last one that explains the digits."""
    for number, row in enumerate(counts):
        if (most := max(row, default=0)) == 0:
            continue
        together = -(-len(row) // COLUMNS_MAX)
        cells = [max(row[start : start + together]) for start in range(0, len(row), together)]
        yield f"layer {number:>3} {''.join(str(min(9, 10 * count // most)) for count in cells)}"
    yield "a digit an expert: tenths of the most tokens of an expert in the layer"


def _picture(counts: Counts) -> Iterator[str]:
    """Yield a heat map as SVG: a row a layer, a column an expert, each with its number as a title."""
    columns = max(map(len, counts), default=0)
    width, height = MARGIN + columns * CELL, MARGIN + len(counts) * CELL
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="9">'
    yield f'<text x="{MARGIN}" y="12">expert 0 to {columns - 1}</text>'
    for number, row in enumerate(counts):
        top, most = MARGIN // 2 + number * CELL, max(max(row, default=0), 1)
        yield f'<text x="0" y="{top + CELL - 1}">layer {number}</text>'
        for expert, count in enumerate(row):
            left, colour = MARGIN + expert * CELL, _colour(count / most)
            yield (
                f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" fill="{colour}">'
                f"<title>layer {number}, expert {expert}: {count} tokens</title></rect>"
            )
    yield "</svg>\n"


def _colour(share: float) -> str:
    """Return the colour of a share between 0 and 1."""
    dark, middle, light = COLOURS
    first, second, part = (dark, middle, 2 * share) if share < 0.5 else (middle, light, 2 * share - 1)
    return "#" + "".join(f"{round(low + (high - low) * part):02x}" for low, high in zip(first, second, strict=True))
