"""The partial structuring of a file with mistakes: its wrong parts are left out, so that the rest can be checked.

A left-out value may make others look wrong: an engine without a model, an unreferenced node. Such consequences are
recognised by the left-out path and by the words of the cross-checks, and are not reported as further mistakes.

The key `kind` of `[engine.NAME]` selects the class of its section, and so its other keys. Where `kind` is wrong, only
keys of all kinds are read. A `kind` of None, which TOML cannot express, marks a mistake already reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import TypeAlias, cast

import attrs
from attrs import frozen

from protocol.strict.hooks import Hook
from protocol.strict.mistakes import Mistake, Mistakes, describe, join, segment, wrong
from protocol.strict.structure import structure
from supervisor.config import gone_keys, other_words
from supervisor.config.schema import DEFAULT_KIND, EngineSection, Kinds, Tables

Table: TypeAlias = dict[str, object]

ROUNDS_MAX = 4  # rounds of structuring: a part left out in one may uncover mistakes for the next
ASSUMED: dict[str, object] = {"path": "."}  # values for missing required keys
MULTILINE_TABLES = ("settings", "environment")  # values here may have line breaks
KIND = re.compile(r"engine(\.[\w-]+|\[.+\])\.kind")  # the path of the key that selects the other keys
# The paths of an engine, or of a key by which it is found, and of an entry that other keys name.
ENGINE = re.compile(r"engine(?:\.[\w-]+|\[.+?\])(?:\.(model|leg))?")
NAMED = re.compile(r"(model|node|pool)(?:\.([\w-]+)|\[\"(.+)\"\])")
BARE = re.compile(r"[\w-]+", re.ASCII)  # a key that stands in a path as it is
UNKNOWN = re.compile(r"is no(?:t a key here(?:; did you mean ([a-z_]+)\?(?= |$)|; |$)| longer a key: )")


@frozen
class Pruned:
    """The valid part of a file, and the mistakes in the parts left out."""

    tables: Tables | None
    mistakes: tuple[Mistake, ...]
    left_out: tuple[str, ...]  # paths

    def explains(self, mistake: Mistake) -> bool:
        """Whether a mistake may be a mere consequence of a left-out part."""
        return any(_concerns(path, mistake) for path in self.left_out)


def _concerns(path: str, mistake: Mistake) -> bool:
    if _is_prefix(path, mistake.path) or _is_named(path, mistake.message):
        return True
    if mistake.message.startswith("is missing") and path.startswith(f"{mistake.path}["):  # a list with a wrong item
        return True
    parent, _, key = path.rpartition(".")
    if mistake.path.rpartition(".")[0] == parent and f"means nothing without {key}" in mistake.message:
        return True
    return _is_missed(path, mistake)


def _is_named(path: str, message: str) -> bool:
    """Whether a sentence names the key at a path, or one below it; the name of a table alone may be any word."""
    if path not in message:
        return False
    end = r"(?![\w-])" if "." in path or "[" in path else r"\.\w"
    return re.search(rf"(?<![\w.-]){re.escape(path)}{end}", message) is not None


def _is_missed(path: str, mistake: Mistake) -> bool:
    """Whether a mistake may be only about the missing entry at a path."""
    message = mistake.message
    if (engine := ENGINE.fullmatch(path)) is not None:
        if engine[1] == "leg":
            of_engine = mistake.path.rpartition(".")[0] == path.removesuffix(".leg")
            return "whose leg is" in message or (of_engine and (".leg is" in message or message == "is missing"))
        return "no engine " in message or (mistake.path, message) == ("engine", "must not be empty")
    if path == "node":
        return "no node " in message
    if (named := NAMED.fullmatch(path)) is None:
        return False
    table, name, quoted = named.groups()
    is_last = (mistake.path, message) == (table, "must not be empty")
    return is_last or f"no {table} {name or quoted}".casefold() in message.casefold()


def structure_valid_parts(data: Table, kinds: Kinds) -> Pruned:
    """Structure the data of a file without its wrong parts."""
    hooks: dict[type[object], Hook] = {EngineSection: lambda value, _: read_engine(kinds, value)}
    data = deepcopy(data)
    mistakes = list(_unprintable(data, ""))
    left_out = [mistake.path for mistake in mistakes]
    for path in left_out:
        _leave_out(data, path)
    for _ in range(ROUNDS_MAX):
        try:
            return Pruned(structure(data, Tables, hooks), tuple(mistakes), tuple(left_out))
        except Mistakes as error:
            before = tuple(left_out)
            found = [_explained(mistake, kinds) for mistake in error.mistakes]
            misspelled = {path for mistake in found for path in _suggested(mistake)}
            for mistake in found:
                is_consequence = mistake.message == "is missing" and mistake.path in misspelled
                if not is_consequence and not any(_concerns(path, mistake) for path in before):
                    mistakes.append(mistake)
                left_out += _leave_out_wrong(data, mistake)
            left_out += misspelled
    return Pruned(None, tuple(mistakes), tuple(left_out))


def _leave_out_wrong(data: Table, mistake: Mistake) -> tuple[str, ...]:
    """Remove the part with a mistake; return its path if consequences may follow, as none do from unknown keys."""
    if mistake.unnamed:
        table, key = _find(data, mistake.path)
        unknown = cast("Table", table if key is None else table[key])
        for name in mistake.unnamed:
            unknown.pop(name, None)
        return ()
    _leave_out(data, mistake.path)
    return () if UNKNOWN.match(mistake.message) else (mistake.path,)


def _explained(mistake: Mistake, kinds: Kinds) -> Mistake:
    if not UNKNOWN.match(mistake.message):
        return mistake
    gone = gone_keys.explained(mistake)
    return other_words.explained(mistake, kinds) if gone is mistake else gone


def _suggested(mistake: Mistake) -> Iterator[str]:
    """Yield the path of the key suggested by a mistake about an unknown key: it is misspelled, not missing."""
    if (match := UNKNOWN.match(mistake.message)) is not None and match[1]:
        yield join(mistake.path.rpartition(".")[0], match[1])


def _unprintable(value: object, path: str) -> Iterator[Mistake]:
    """Yield a mistake for each key and string with control characters, since no terminal should receive them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            inner_path = join(path, segment(key))
            if not key.isprintable():
                yield Mistake(inner_path, "the name has a character that cannot be printed")
            yield from _unprintable(inner, inner_path)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _unprintable(inner, f"{path}[{number}]")
    elif isinstance(value, str):
        multiline = any(f".{table}." in path for table in MULTILINE_TABLES)
        text = value.replace("\n", "").replace("\t", "") if multiline else value
        if "\0" in value or not text.isprintable():
            yield Mistake(path, "has a character that cannot be printed")


def _leave_out(data: Table, path: str) -> None:
    """Remove the value at a path, or the list around it; a missing required key gets a default."""
    table, key = _find(data, path)
    if key is None:
        _add_assumed(table, path.rpartition(".")[2], data)
    elif KIND.fullmatch(path):
        table[key] = None
    else:
        del table[key]


def _find(data: Table, path: str) -> tuple[Table, str | None]:
    """Return the innermost table on a path, and its key for the rest of the path; None if there is none."""
    table, rest = data, path
    while True:
        if (bare := BARE.match(rest)) is not None:
            key = bare[0] if bare[0] in table else None
        else:
            key = next((key for key in table if _is_prefix(segment(key), rest)), None)
        if key is None:
            return table, None
        rest = rest[len(segment(key)) :].removeprefix(".")
        inner = table[key]
        if not rest or not isinstance(inner, dict):
            return table, key
        table = cast("Table", inner)


def _is_prefix(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith((f"{prefix}.", f"{prefix}["))


def _add_assumed(table: Table, key: str, data: Table) -> None:
    models = data.get("model")
    if key == "model" and isinstance(models, dict) and models:
        table[key] = next(iter(models))
    elif key in ASSUMED:
        table[key] = ASSUMED[key]


def read_engine(kinds: Kinds, value: object) -> EngineSection:
    """Return the section of a table of the file, as its kind structures it; raises `Mistakes`."""
    if not isinstance(value, dict):
        raise wrong(f"expected an object, got {describe(value)}")
    kind = value.get("kind", DEFAULT_KIND)
    if kind is None:
        shared = {key: inner for key, inner in value.items() if key != "kind" and not _owner(key, EngineSection, kinds)}
        return structure(shared, EngineSection)
    if not isinstance(kind, str) or kind not in kinds:
        raise wrong(f"expected {' or '.join(map(describe, kinds))}, got {describe(kind)}", "kind")
    foreign = {key: owner for key in value if (owner := _owner(key, kinds[kind], kinds)) is not None}
    mistakes = [Mistake(segment(key), f"is for engines of kind {describe(owner)}") for key, owner in foreign.items()]
    try:
        section = structure({key: inner for key, inner in value.items() if key not in foreign}, kinds[kind])
    except Mistakes as error:
        raise Mistakes((*mistakes, *error.mistakes)) from None
    if mistakes:
        raise Mistakes(tuple(mistakes))
    return section


def _owner(key: str, own: type[EngineSection], kinds: Kinds) -> str | None:
    """Return the other kind to which a key belongs, None if it belongs to `own` or to no kind."""
    if key in _keys(own):
        return None
    return next((kind for kind, section in kinds.items() if key in _keys(section)), None)


def _keys(section: type[EngineSection]) -> set[str]:
    return {field.name for field in attrs.fields(section)}
