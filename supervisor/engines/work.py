"""One engine of a node and the priority_inbox of its requests: what a kind of engine is given to make a child of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen

from actors.engines.port import Engine
from actors.kit.calls import Address
from actors.kit.priority_inbox import PriorityInbox, priority_inbox
from actors.text.model import TextModel
from protocol.cost import work as cost
from protocol.messages import Finished, Generate, Started, Tokens
from protocol.model_folder import Digest
from supervisor.config.schema import EngineSection
from supervisor.supervision.registration import Registration

Work: TypeAlias = PriorityInbox[Generate, Started | Tokens, Finished]
"""The requests that wait for one engine, or for a router: by priority, and fair between their owners."""


def work_queue(size: int) -> tuple[Address[Generate, Started | Tokens, Finished], Work]:
    """Return where requests are put, and the priority_inbox that they wait in."""
    return priority_inbox(size, lambda request: request.priority, lambda request: request.owner, cost)


@frozen
class LocalEngine:
    """One engine that this node is to run, and what its model, its node and its siblings give it."""

    name: str
    section: EngineSection
    registration: Registration[Engine]  # where it is published while it can be asked
    inbox: Work
    came: Callable[[], None]  # called when the engine is up: what waits for its siblings may come to it
    turn_away: Callable[[], None]  # called when it is gone, for what waits in the inbox
    text: TextModel | None = None  # if its section `reads_text`
    digest: Digest = ()  # of the model's folder, as this node has read it
