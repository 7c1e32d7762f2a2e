"""The publishers of a node's engines: children beside the engines, whose failures are no engine's.

What a publisher knows of its engine outlives its restarts, since others watch it by number; a restart forgets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from actors.engines.blocks.block_log import BlockLog
from actors.engines.port import Engine
from actors.kit.calls import Address, mailbox
from actors.publisher import Published, Watch, WatchReply, publisher
from protocol.messages.engine import Done, WatchLoad
from protocol.messages.kv_events import WatchBlocks
from supervisor.links.serving import Service, Services
from supervisor.runtime import Runtime
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Tree

WAITING_MAX = 64  # questions to one publisher that it has not taken yet


def engine_publisher(runtime: Runtime, name: str, engine: Registration[Engine]) -> tuple[Child, Services]:
    """Return the publisher of one engine, and what it serves under the engine's name."""
    address: Address[Watch, WatchReply, Done]
    address, inbox = mailbox(WAITING_MAX)
    service = cast("Service", address)  # by the rows of both messages
    child = Child(
        name=f"events-{name}",
        run=publisher,
        args=(inbox, engine, Published(BlockLog(runtime.new_id()))),
        about="its blocks and its load",
    )
    return child, {(name, WatchBlocks): service, (name, WatchLoad): service}


def publishers_tree(publishers: Sequence[Child]) -> tuple[Tree, ...]:
    """Return the tree of the publishers of a node, none without engines."""
    if not publishers:
        return ()
    return (
        Tree(
            name="publishers",
            children=tuple(publishers),
            restarts_max=None,
            backoff=Backoff(crashes=True),
            about="the blocks and the loads of engines, for their subscribers",
        ),
    )
