"""A feed of a routing policy: a task beside the router that follows the workers' events, beside their loads.

A policy with a feed is made together with it, and both share the feed's state. The router does not depend on it: while
a feed fails, or is restarted, its policy chooses by the last state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio
from attrs import frozen

from actors.kit.calls import Answer
from protocol.messages.engine import EngineInfo
from protocol.messages.kind import Message


class Watchable(Protocol):
    """A source of streams about one engine: the engine itself, or any of its ranks."""

    @property
    def full_name(self) -> str:
        """Its name, which is unique in its pool."""

    @property
    def info(self) -> EngineInfo | None:
        """The info of its engine, None while it is not known."""

    def watch(self, request: Message, credit: int) -> AbstractAsyncContextManager[Answer[Message, Message]]:
        """Ask for a stream from its node, under its name; raises a `RequestError` if it cannot be asked."""


class WatchablePool(Protocol):
    """The workers of one model, as a feed follows them: changes of loads do not concern it."""

    def watchable(self) -> Sequence[Watchable]:
        """Return the available workers that publish their blocks."""

    async def wait_members_changed(self) -> None:
        """Wait until a worker has come or gone; not for loads."""


@frozen
class FeedGauge:
    """A gauge of a feed, a metric that is labelled with the model."""

    name: str
    about: str
    read: Callable[[], float]


class Feed(Protocol):
    """A feed, and how the tree and the metrics of a node show it."""

    @property
    def about(self) -> str:
        """A description for operators."""

    @property
    def limits(self) -> tuple[tuple[str, float], ...]:
        """Its limits, for operators."""

    @property
    def gauges(self) -> Sequence[FeedGauge]:
        """Its gauges."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Follow the workers until cancelled."""
