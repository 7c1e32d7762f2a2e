"""An engine that spans nodes: a host with its ranks on each, all of them or none.

The node of rank 0 asks every other one for its rank, in one nursery with its own host: what ends first ends the rest,
and its supervisor starts them all again. The others run their ranks exactly as long as they are asked to.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import msgspec
import trio
from attrs import asdict, define, frozen

from actors.engines.port import Engine
from actors.kit.calls import BugCounter, Call, Inbox
from protocol.errors import ActorError, BadRequest, Draining, EngineDied, EngineLost, RequestError, StartFailed
from protocol.messages import Done, RankStarted, RunRank
from supervisor.cluster.directory import Directory
from supervisor.config.load import Cluster
from supervisor.engines.sglang.section import SglangSection
from supervisor.links.link import Link
from supervisor.supervision.registration import Registration

log = logging.getLogger(__name__)

Asked: TypeAlias = Call[RunRank, RankStarted, Done]

# What the files of its nodes need not agree about.
OF_EACH_NODE = {"environment", "deadlines", "ladder", "start_within_s", "silent_s"}


def host_address(host: str) -> str:
    """Return the address at which a host of the file is reached."""
    return "127.0.0.1" if host == "localhost" else host


def meeting(cluster: Cluster, name: str) -> str | None:
    """Return where the ranks of an engine meet, host and port, None for an engine on one node."""
    section = cluster.engine[name]
    if not isinstance(section, SglangSection) or not section.ranks_on:
        return None
    host = host_address(cluster.node[section.node].host)
    return f"[{host}]:{section.dist_port}" if ":" in host else f"{host}:{section.dist_port}"


def agreed(cluster: Cluster, name: str) -> dict[str, str]:
    """Return what all nodes of an engine must have in their files, as JSON by key."""
    section = cluster.engine[name]
    said = {key: value for key, value in asdict(section).items() if key not in OF_EACH_NODE}
    said[f"node.{section.node}.host"] = host_address(cluster.node[section.node].host)
    return {key: msgspec.json.encode(value, order="deterministic").decode() for key, value in said.items()}


# Where rank 0 is -------------------------------------------------------------------------


class Keeps(Protocol):
    """Keeps the host of rank 0, which is to say the engine."""

    async def __call__(self, port: int | None, *, task_status: trio.TaskStatus[None]) -> None:
        """Keep it until it ends, met at `port` if it is a prefill; raises `ActorError` then."""


@define(eq=False)
class Others:
    """The other nodes of an engine, as the node of rank 0 asks them."""

    engine: str
    nodes: Sequence[str]  # from rank 1 on
    agreed: dict[str, str]
    directory: Directory
    linked_within_s: float
    plug: Registration[Engine]  # says what the engine waits for
    gateway: str  # the node where it is asked

    async def together(  # noqa: ASYNC128  # keep calls started()
        self, keep: Keeps, another: Callable[[], int | None], *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Keep all ranks of the engine, of which `keep` keeps the first; `started()` is for that one to say.

        Raises `StartFailed` if another node cannot be asked or refuses, `EngineDied` when any other rank ends, and what
        `keep` and `another`, which says where this life is met, raise.
        """
        links = await self._linked()
        port = another()
        failures: list[ActorError] = []

        def ended(error: ActorError) -> None:
            failures.append(error)
            nursery.cancel_scope.cancel(reason="all ranks or none")

        async with trio.open_nursery() as nursery:
            try:
                nursery.start_soon(self._give_way, ended)
                # First all that an earlier life has left elsewhere must be gone: it could meet the new rank 0.
                for rank, link in enumerate(links, 1):
                    await nursery.start(self._hold, rank, link, port, ended)
                await keep(port, task_status=task_status)
            except ActorError as error:
                ended(error)  # raised below: here, the nursery would wrap it in a group
        raise failures[0]

    async def _hold(
        self,
        rank: int,
        link: Link,
        port: int | None,
        ended: Callable[[ActorError], None],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """Have another node run its rank; `started()` when that begins. Raises `StartFailed` before, ends all after."""
        started, why = False, "it ended"
        try:
            async with link.ask(RunRank(self.agreed, port), 1, self.engine) as answer:
                async for _ in answer:
                    started = True
                    task_status.started()
        except RequestError as error:
            why = error.detail
        sentence = f"rank {rank} of engine {self.engine} on node {self.nodes[rank - 1]}: {why}"
        if not started:
            raise StartFailed(sentence)
        ended(EngineDied(sentence))

    async def _give_way(self, ended: Callable[[ActorError], None]) -> None:
        """End the engine in peace once another of its nodes drains: it is chosen no more, and what runs may finish.

        That node waits for it, as long as its drain may take. The gateway's has admitted some: they are served.
        """
        while (lacks := self._lacks()) is None or self.directory.draining:
            await self.directory.wait_changed()
        log.info("giving way", extra={"engine": self.engine, "reason": lacks})
        if self.plug.current is not None:
            self.plug.set_blocked_by(lacks)
            if not (self.gateway in self.nodes and self.directory.node(self.gateway).state.draining):
                self.plug.withdraw()
            await self.directory.wait_worker_idle(self.engine)
        ended(EngineDied(f"engine {self.engine} gave way: {lacks}"))

    async def _linked(self) -> list[Link]:
        """Wait for links to the other nodes; raises `StartFailed` if it takes too long."""
        lacks = self._lacks()
        try:
            with trio.move_on_after(self.linked_within_s):
                while lacks is not None:
                    if lacks != self.plug.blocked_by:
                        log.info("waiting", extra={"engine": self.engine, "reason": lacks})
                        self.plug.set_blocked_by(lacks)
                    await self.directory.wait_changed()
                    lacks = self._lacks()
        finally:
            self.plug.set_blocked_by(None)
        if lacks is not None:
            raise StartFailed(f"engine {self.engine} spans {len(self.nodes) + 1} nodes: {lacks}")
        return [link for name in self.nodes if (link := self.directory.node(name).link) is not None]

    def _lacks(self) -> str | None:
        """Say which of the other nodes cannot be asked now, and why."""
        for name in self.nodes:
            node = self.directory.node(name)
            if node.link is None or node.link.lost:
                return f"there is no link to node {name}"
            if node.state.draining:
                return f"node {name} drains"
        return None


# Where the others are --------------------------------------------------------------------


@frozen
class Own:
    """What this node's own file says of an engine."""

    directory: Directory
    agreed: Mapping[str, str]
    ports: Container[int | None] = (None,)  # at which a life of it may be met

    def check(self, request: RunRank) -> None:
        """Raise `BadRequest` if the asker's file says something else: the ranks would not be of one engine.

        Raises `Draining` if this node drains.
        """
        if self.directory.draining:
            raise Draining(f"node {self.directory.name} drains")
        differ = [key for key, said in self.agreed.items() if request.agreed.get(key) != said]
        if request.agreed.keys() - self.agreed.keys():
            differ.append("keys that are unknown here")
        if differ:
            raise BadRequest(f"the file of node {self.directory.name} disagrees about {', '.join(differ)}")
        if (port := request.bootstrap_port) not in self.ports:
            met = "no port" if port is None else f"port {port}"
            raise BadRequest(f"the file of node {self.directory.name} has no life of it at {met}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the rank among those that a drain of this node waits for."""
        self.directory.follower_ranks += 1
        try:
            yield
        finally:
            self.directory.follower_ranks -= 1
            self.directory.notify()


async def run_follower_rank(
    inbox: Inbox[Asked],
    own: Own,
    keep: Callable[[int | None], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run this node's rank of an engine whenever it is asked for, one at a time: the next waits until the last is gone.

    `keep` starts its host with the port that it is told and keeps it until it ends, which it says by an `ActorError`.
    """
    bugs = BugCounter()
    task_status.started()
    while True:
        call = await inbox.receive()
        with own.running(), call.answering(bugs) as answer:
            own.check(call.request)
            answer.put(RankStarted())
            try:
                await keep(call.request.bootstrap_port)
            except ActorError as error:  # whoever asked is to judge it, and starts all ranks again
                raise EngineLost(str(error)) from error
