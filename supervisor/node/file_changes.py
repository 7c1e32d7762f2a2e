"""The differences between two versions of `cluster.toml`, key by key, and a sentence for each of them.

An operator who reloads a file must be able to see what it has changed and what it has not, so no difference is without
a sentence. Values of engines and models may be secrets: those are reported by the names of their keys alone, which is
up to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import attrs
from attrs import evolve, frozen

from supervisor.config.pools import PoolSection
from supervisor.config.schema import Cluster, NodeSection
from supervisor.links.endpoint import Endpoint

RESTART = "until this node is started again"


@frozen
class Change:
    """A key of the file whose value differs; None stands for a value that is absent."""

    path: tuple[str, ...]
    old: object
    new: object

    def __str__(self) -> str:
        return ".".join(self.path)


def changes(old: object, new: object, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield what differs between two values of the same type, key by key."""
    if attrs.has(type(old)) and type(old) is type(new) and not isinstance(old, Endpoint):
        for attribute in attrs.fields(cast("type[attrs.AttrsInstance]", type(old))):
            if attribute.init:
                name = attribute.name
                yield from changes(getattr(old, name), getattr(new, name), (*path, name))
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from changes(old.get(key), new.get(key), (*path, str(key)))
    elif old != new:
        yield Change(path, old, new)


def value_at(cluster: Cluster, path: tuple[str, ...]) -> object:
    """Return the value at a path, None if there is none."""
    value: object = cluster
    for key in path:
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    return value


def describe_applied(change: Change) -> str:
    """Return the sentence about a change that is in force now."""
    change = _of_address(change)
    if isinstance(change.new, NodeSection):
        return f"node {change.path[1]} is known now"
    return f"{change} is {_shown(change.new)} now, and was {_shown(change.old)}"


def describe_unapplied(change: Change) -> str:
    """Return the sentence about a change that takes a restart."""
    change = _of_address(change)
    if isinstance(change.old, NodeSection):
        return f"node {change.path[1]} stays known as it was {RESTART}; drain it if it is to go"
    if isinstance(change.new, NodeSection):
        return f"node {change.path[1]} stays unknown {RESTART}: it was started without links"
    if change.path == ("gateway", "requests_max"):
        return f"{change} can only be lowered and raised again, to what it was at the start, {RESTART}"
    return f"{change} stays {_shown(change.old)} {RESTART}, though the file says {_shown(change.new)}"


def _of_address(change: Change) -> Change:
    """Return the change of a known node's address in place of the change of its whole section."""
    if isinstance(change.old, NodeSection) and isinstance(change.new, NodeSection):
        return evolve(change, path=(*change.path, "listen"), old=change.old.listen, new=change.new.listen)
    return change


def _shown(value: object) -> str:
    if isinstance(value, PoolSection):
        return f"{_shown(value.engines)} (priority {value.priority})"
    if isinstance(value, tuple | frozenset):
        return ", ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
