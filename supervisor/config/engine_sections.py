"""The reading of `[engine.NAME]`: its key `kind` selects the class of its section, and so its other keys.

Where `kind` is wrong, it is unknown which other keys are right, so only the keys that all kinds share are read. A
`kind` of None, which TOML cannot express, says that `partial` has reported the mistake.
"""

from __future__ import annotations

import attrs

from protocol.strict.mistakes import Mistake, Mistakes, describe, segment, wrong
from protocol.strict.structure import structure
from supervisor.config.schema import DEFAULT_KIND, EngineSection, Kinds


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
