"""The publishers of a node's engines: children beside the engines, whose failures are no engine's.

What a publisher knows of its engine outlives its restarts, since others watch it by number; a restart forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from actors.engines.blocks.block_log import BlockLog
from actors.engines.port import Engine
from actors.kit.calls import Address, mailbox
from actors.publisher import Published, Watch, WatchReply, publisher
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.kv_events import WatchBlocks, WatchLoad
from supervisor.links.serving import Service, Services
from supervisor.runtime import Runtime
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Tree

WAITING_MAX = 64  # questions to one publisher that it has not taken yet


def publisher_children(
    runtime: Runtime, engines: Mapping[str, Registration[Engine]]
) -> tuple[tuple[Tree, ...], Services]:
    """Return the tree of the publishers, none without engines, and what they serve under the engines' names."""
    children = list[Child]()
    served: dict[tuple[str, type[Message]], Service] = {}
    for name, registration in engines.items():
        address: Address[Watch, WatchReply, Done]
        address, inbox = mailbox(WAITING_MAX)
        service = cast("Service", address)  # by the rows of both messages
        served[name, WatchBlocks] = served[name, WatchLoad] = service
        published = Published(BlockLog(runtime.new_id()))
        children.append(
            Child(
                name=f"events-{name}",
                run=publisher,
                args=(inbox, registration, published),
                about="its blocks and its load",
            )
        )
    if not children:
        return (), served
    tree = Tree(
        name="publishers",
        children=tuple(children),
        restarts_max=None,
        backoff=Backoff(crashes=True),
        about="what engines tell of themselves, for whoever watches it",
    )
    return (tree,), served
