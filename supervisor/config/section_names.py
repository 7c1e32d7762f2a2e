"""The names of sections as operators mistake them: without quotes around a dot, in a list, or left out.

TOML reads `[model.Qwen3-1.7B]` as a table `7B` in a table `Qwen3-1`. Such sections are put where they were meant, so
that one mistake about the name is reported, and all else is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TypeAlias, cast

import attrs
from attrs import NOTHING, frozen

from protocol.strict.mistakes import Mistake, join, segment

Entries: TypeAlias = dict[str, object]
Sections: TypeAlias = Mapping[str, tuple[type[attrs.AttrsInstance], ...]]
"""The classes of the sections that a table has, by the name of the table."""

DEFAULT_NAMES = {"node": "main"}
NAMES_WITHOUT_DOTS = ("node",)  # the rule for such names is a mistake of its own


def mend(data: Entries, lines: dict[str, int], sections: Sections) -> list[Mistake]:
    """Move sections with mistaken names to where they were meant, with their lines; return a mistake for each."""
    mistakes: list[Mistake] = []
    for table, classes in sections.items():
        keys = _Keys.of(classes)
        if isinstance(entries := data.get(table), list):
            mistakes += _mend_list(data, lines, table, entries)
        elif isinstance(entries, dict):
            if any(key in keys.all and not isinstance(value, dict) for key, value in entries.items()):
                mistakes += _mend_nameless(data, lines, table, keys)
            mistakes += _mend_unquoted(cast("Entries", data[table]), lines, table, keys)
    return mistakes


def _mend_list(data: Entries, lines: dict[str, int], table: str, sections: list[object]) -> Iterator[Mistake]:
    """Give each section of `[[table]]` a name."""
    data[table] = {f"{table}-{number}": section for number, section in enumerate(sections)}
    for number in range(len(sections)):
        _copy_lines(lines, f"{table}[{number}]", f"{table}.{table}-{number}")
    yield Mistake(table, f"has sections without names: write each as [{table}.NAME]")


def _mend_nameless(data: Entries, lines: dict[str, int], table: str, keys: _Keys) -> Iterator[Mistake]:
    """Give the section of `[table]` the name by which engines or the gateway refer to it, or any."""
    entries = cast("Entries", data[table])
    own = {key: value for key, value in entries.items() if not _is_named(key, value, keys)}
    engines = _tables(data.get("engine"))
    referring = [data.get("gateway"), engines, *engines.values()]  # an engine may have no name either
    names = [name for each in referring if isinstance(name := _tables(each).get(table), str)]
    name = next(iter(names), DEFAULT_NAMES.get(table, f"{table}-0"))
    data[table] = {**{key: value for key, value in entries.items() if key not in own}, name: own}
    for key in own:
        _copy_lines(lines, join(table, segment(key)), join(join(table, segment(name)), segment(key)))
    yield Mistake(table, f"has a section without a name: write [{table}.NAME]")


def _tables(value: object) -> Entries:
    return cast("Entries", value) if isinstance(value, dict) else {}


def _is_named(key: str, value: object, keys: _Keys) -> bool:
    """Whether an entry beside the keys of a section without a name is a section of that name."""
    return isinstance(value, dict) and (key not in keys.all or not keys.needed.isdisjoint(value))


def _mend_unquoted(entries: Entries, lines: dict[str, int], table: str, keys: _Keys) -> Iterator[Mistake]:
    """Put sections with a dot in their names, and no quotes, where they were meant."""
    for first, section in [*entries.items()]:
        if not isinstance(section, dict):
            continue
        found = [*_unquoted(section, keys, is_section=keys.has_own(section))]
        for parts in sorted(found, key=len, reverse=True):  # the innermost first
            name = ".".join((first, *parts))
            entries.setdefault(name, _taken_out(section, parts))
            old = table
            for part in (first, *parts):
                old = join(old, segment(part))
            _copy_lines(lines, old, join(table, segment(name)))
            if table not in NAMES_WITHOUT_DOTS:
                yield Mistake(old, f'a name with a dot needs quotes: write [{table}."{name}"]')
        if not section and first in entries and any(key.startswith(f"{first}.") for key in entries):
            del entries[first]


@frozen
class _Keys:
    """The keys of a section."""

    all: frozenset[str]
    needed: frozenset[str]  # a table with one of these is a section

    @classmethod
    def of(cls, classes: tuple[type[attrs.AttrsInstance], ...]) -> _Keys:
        fields = [field for each in classes for field in attrs.fields(each)]
        needed = frozenset(field.name for field in fields if field.default is NOTHING)
        return cls(frozenset(field.name for field in fields), needed)

    def has_own(self, table: Entries) -> bool:
        return not self.all.isdisjoint(table)


def _unquoted(table: Entries, keys: _Keys, *, is_section: bool) -> Iterator[tuple[str, ...]]:
    """Yield the rest of each name that continues below a table; `is_section`: the table is a section by itself.

    What is below a section may be a misspelled table of it, so it must have a key that only sections need. Elsewhere a
    table with any value is one, although its keys may all be misspelled.
    """
    for key, inner in table.items():
        if not isinstance(inner, dict) or key in keys.all or get_close_matches(key, keys.all, n=1, cutoff=0.75):
            continue
        below = cast("Entries", inner)
        wanted = (keys.needed or keys.all) if is_section else keys.all
        has_value = not below or any(not isinstance(value, dict) for value in below.values())
        own = not wanted.isdisjoint(below) or (has_value and not is_section)
        if own:
            yield (key,)
        for rest in _unquoted(below, keys, is_section=own or is_section):
            yield (key, *rest)


def _taken_out(table: Entries, parts: tuple[str, ...]) -> Entries:
    """Remove a table below another one, with the tables in between that are empty then, and return it."""
    key, *rest = parts
    inner = cast("Entries", table[key])
    if not rest:
        del table[key]
        return inner
    found = _taken_out(inner, tuple(rest))
    if not inner:
        del table[key]
    return found


def _copy_lines(lines: dict[str, int], old: str, new: str) -> None:
    moved = {path: line for path, line in lines.items() if path == old or path.startswith((f"{old}.", f"{old}["))}
    lines.update({new + path[len(old) :]: line for path, line in moved.items()})
