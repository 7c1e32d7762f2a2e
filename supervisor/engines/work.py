"""One engine of a node and the inbox of its requests: what a kind of engine is given to make a child of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen

from actors.engines.port import Engine
from actors.kit.calls import Address
from actors.kit.priority_inbox import PriorityInbox, priority_inbox
from actors.text.model import TextModel
from protocol.cost import generation_tokens
from protocol.messages import Finished, Generate, Started, Tokens
from protocol.model_folder import Digest
from supervisor.config.schema import EngineSection
from supervisor.supervision.registration import Registration

RequestInbox: TypeAlias = PriorityInbox[Generate, Started | Tokens, Finished]
"""The requests that wait for one engine, or for a router: by priority, and fair between their owners."""


def request_inbox(size: int) -> tuple[Address[Generate, Started | Tokens, Finished], RequestInbox]:
    """Return the address at which requests are asked, and the inbox in which at most `size` of them wait."""
    return priority_inbox(size, lambda request: request.priority, lambda request: request.owner, generation_tokens)


@frozen
class LocalEngine:
    """One engine that this node is to run: its section, its inbox, and where it is published."""

    name: str
    section: EngineSection
    registration: Registration[Engine]  # where it is published while it can be asked
    inbox: RequestInbox
    on_up: Callable[[], None]  # lets requests that wait at its siblings move to it
    on_down: Callable[[], None]  # lets requests that wait in its inbox be asked elsewhere
    text: TextModel | None = None  # if its section `reads_text`
    digest: Digest = ()  # of the model's folder, as this node has read it
