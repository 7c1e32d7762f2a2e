"""As much of a cluster's description as is right: what is wrong in it is left out, so that the rest can be judged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import TypeAlias, cast

from attrs import frozen

from protocol.strict.hooks import Hook
from protocol.strict.mistakes import Mistake, Mistakes, join, segment
from protocol.strict.structure import structure
from supervisor.config.engine_sections import read_engine
from supervisor.config.schema import EngineSection, Kinds, Tables

Table: TypeAlias = dict[str, object]

ROUNDS_MAX = 4  # what was left out may show what else is wrong
ASSUMED: dict[str, object] = {"path": ".", "kv_tokens_max": 2**20}  # of keys that are missing and have no default
LINES_IN = ("settings", "environment")  # the tables whose values may have several lines
MEANT = re.compile(r"did you mean ([a-z_]+)\?")


@frozen
class Pruned:
    """What could be made of a file: `mistakes` lists what was left out of `tables`, and why."""

    tables: Tables | None
    mistakes: tuple[Mistake, ...]
    left_out: tuple[str, ...]  # the paths

    def explains(self, mistake: Mistake) -> bool:
        """Whether a mistake may follow from what was left out alone."""
        return any(_concerns(path, mistake) for path in self.left_out)


def _concerns(path: str, mistake: Mistake) -> bool:
    at = mistake.path
    return at == path or at.startswith((f"{path}.", f"{path}[")) or path in mistake.message


def structure_what_can_be(data: Table, kinds: Kinds) -> Pruned:
    """Structure a file's data, leaving out what is wrong in it."""
    hooks: dict[type[object], Hook] = {EngineSection: lambda value, _: read_engine(kinds, value)}
    data = deepcopy(data)
    mistakes = list(_unprintable(data, ""))
    left_out = [each.path for each in mistakes]
    for path in left_out:
        _leave_out(data, path)
    for _ in range(ROUNDS_MAX):
        try:
            return Pruned(structure(data, Tables, hooks), tuple(mistakes), tuple(left_out))
        except Mistakes as error:
            known = tuple(left_out)
            mistakes += [each for each in error.mistakes if not any(_concerns(path, each) for path in known)]
            for mistake in error.mistakes:
                left_out += [mistake.path, *_meant(mistake)]
                _leave_out(data, mistake.path)
    return Pruned(None, tuple(mistakes), tuple(left_out))


def _meant(mistake: Mistake) -> Iterator[str]:
    """Yield the path of the key that was meant by one that is none."""
    if (found := MEANT.search(mistake.message)) is not None:
        yield join(mistake.path.rpartition(".")[0], found[1])


def _unprintable(value: object, path: str) -> Iterator[Mistake]:
    """Yield every key and string with characters that no name or path has and no terminal should be sent."""
    if isinstance(value, dict):
        for key, inner in value.items():
            at = join(path, segment(key))
            if not key.isprintable():
                yield Mistake(at, "the name has a character that cannot be printed")
            yield from _unprintable(inner, at)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _unprintable(inner, f"{path}[{number}]")
    elif isinstance(value, str):
        lines = any(f".{table}." in path for table in LINES_IN)
        text = value.replace("\n", "").replace("\t", "") if lines else value
        if "\0" in value or not text.isprintable():
            yield Mistake(path, "has a character that cannot be printed")


def _leave_out(data: Table, path: str) -> None:
    """Remove what stands at a path, or the list that it stands in; give a value to what is missing there."""
    table, at = data, ""
    while True:
        key = next((key for key in table if _leads(join(at, segment(key)), path)), None)
        if key is None:
            _assume(table, path.rpartition(".")[2], data)
            return
        at = join(at, segment(key))
        inner = table[key]
        if at == path or not isinstance(inner, dict):
            del table[key]
            return
        table = cast("Table", inner)


def _leads(at: str, path: str) -> bool:
    return path == at or path.startswith((f"{at}.", f"{at}["))


def _assume(table: Table, key: str, data: Table) -> None:
    models = data.get("model")
    if key == "model" and isinstance(models, dict) and models:
        table[key] = next(iter(models))
    elif key in ASSUMED:
        table[key] = ASSUMED[key]
