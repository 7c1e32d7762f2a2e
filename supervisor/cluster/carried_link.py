"""One link of the mesh while it runs, and what a mesh holds in all."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import formatdate

import trio
from attrs import define, field, frozen

from protocol.greeting import Incarnation
from supervisor.links.link import Link


@define(eq=False)
class CarriedLink:
    """A link that runs, which node has dialed it, and which process of its name the other end is."""

    link: Link
    dialer: str
    incarnation: Incarnation
    gone: trio.Event = field(factory=trio.Event)  # it is the link to its node no more
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@frozen
class MeshStatistics:
    """What a mesh holds at this moment."""

    dialers: Mapping[str, str]  # by the node that a link leads to, the node that has dialed it
    dialing: frozenset[str]  # the nodes that this one dials whenever there is no link to them
    dialed: frozenset[str]  # the nodes to which this one has dialed the link
    unauthenticated: int  # connections that have not proved a name yet
    operators: int


def process_name(incarnation: Incarnation) -> str:
    """Return an incarnation as a log shows it."""
    return f"{incarnation.run[:12]}, started {formatdate(incarnation.started_at, usegmt=True)}"
