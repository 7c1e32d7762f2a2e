"""Engines' own metrics, merged into one text of Prometheus's format with the engine and the rank of each series.

The text of an engine is not trusted: it may come from another node. A line is taken only if it is valid, belongs to the
family above it, and has a name that no metric of ours can have; all others are counted. One text has thousands of
lines, and there is one for each engine, so texts are merged in steps of few lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import trio
from attrs import Factory, define

from protocol.messages.operations import EngineMetrics

LINES_A_STEP = 100  # read or written in about half a millisecond
LINE_LENGTH_MAX = 4096

_HEAD = re.compile(r"# (HELP|TYPE) ([a-zA-Z0-9_:]+) (.*)")
_SERIES = re.compile(r"([a-zA-Z0-9_:]+)(?:{(.*)})? ([-+]?[0-9][0-9.]*(?:e[-+]?[0-9]+)?|NaN|[-+]Inf)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\["\\n])*)"(?:,|$)')
_RANK = re.compile(r"[0-9]{1,5}")
_SUFFIXES = {  # the series of a family, by its type
    "counter": ("",),
    "gauge": ("",),
    "untyped": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
}


@define(eq=False)
class _Family:
    """One family: its lines of help and type, and the series of all engines."""

    type: str
    help: str = ""
    series: list[str] = Factory(list)

    def text(self, name: str) -> Iterator[str]:
        """Yield its text in pieces."""
        yield f"# HELP {name} {self.help}\n# TYPE {name} {self.type}\n"
        for start in range(0, len(self.series), LINES_A_STEP):
            yield "".join(self.series[start : start + LINES_A_STEP])


@define(eq=False)
class _Merge:
    """The families of the engines read so far, by name, and the number of series left out by engine."""

    prefixes: tuple[str, ...]  # the beginnings of metrics' names, one for each kind of engine
    families: dict[str, _Family] = Factory(dict)
    left_out: dict[str, int] = Factory(dict)

    def read(self, engine: str, metrics: EngineMetrics) -> Iterator[None]:
        """Read the metrics of one engine, with a yield after each step."""
        self.left_out[engine] = max(0, metrics.left_out)
        name, helps, family = "", "", None
        for number, line in enumerate(_lines(metrics.text), start=1):
            if (head := _HEAD.fullmatch(line)) is not None:
                word, about = head[1], head[3]
                if head[2] != name:
                    name, helps, family = head[2], "", None
                if word == "HELP":
                    helps = about
                else:
                    family = self._family(name, about, helps)
            elif line and not self._take(engine, name, family, line):
                self.left_out[engine] += not line.startswith("#")
            if not number % LINES_A_STEP:
                yield

    def _family(self, name: str, kind: str, helps: str) -> _Family | None:
        """Return the family of a name, None for a forbidden name, an invalid type, or another engine's other type."""
        if kind not in _SUFFIXES or not name.startswith(self.prefixes):
            return None
        family = self.families.setdefault(name, _Family(kind, helps))
        return family if family.type == kind else None

    def _take(self, engine: str, name: str, family: _Family | None, line: str) -> bool:
        """Add a series to its family with its engine and rank; return whether it is valid."""
        series = _SERIES.fullmatch(line)
        if family is None or series is None or not series[1].startswith(name):
            return False
        labels = _labels(series[2] or "")
        if labels is None or series[1][len(name) :] not in _SUFFIXES[family.type]:
            return False
        rank = labels.get("dp_rank", "0")
        for ours in ("engine", "rank"):  # Prometheus renames labels in the same way when it adds its own
            if ours in labels:
                labels[f"exported_{ours}"] = labels.pop(ours)
        every = {"engine": engine, "rank": rank if _RANK.fullmatch(rank) else "0", **labels}
        text = ",".join(f'{label}="{value}"' for label, value in every.items())
        family.series.append(f"{series[1]}{{{text}}} {series[3]}\n")
        return True


async def merge_in_steps(
    metrics: Mapping[str, EngineMetrics], prefixes: tuple[str, ...]
) -> tuple[bytes, dict[str, int]]:
    """Return the text of the metrics of engines, given by their names, and the number of series of each left out.

    The name of a metric begins with one of `prefixes`, the kinds' own; any other is left out. Each family has one line
    of help and one of type; a family without series has no lines.
    """
    merge = _Merge(prefixes)
    for engine, reported in sorted(metrics.items()):
        for _ in merge.read(engine, reported):
            await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
    texts: list[bytes] = []
    for name, family in sorted(merge.families.items()):
        for piece in family.text(name) if family.series else ():
            texts.append(piece.encode())
            await trio.lowlevel.checkpoint()
    return b"".join(texts), merge.left_out


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text; a line above the limit as `?`, which is no line of the format."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end] if end - start <= LINE_LENGTH_MAX else "?"
        start = end + 1


def _labels(text: str) -> dict[str, str] | None:
    """Return labels with their values in written form; None if one is malformed or repeated."""
    labels: dict[str, str] = {}
    place = 0
    while place < len(text):
        label = _LABEL.match(text, place)
        if label is None or label[1] in labels:
            return None
        labels[label[1]] = label[2]
        place = label.end()
    return labels
