"""An engine that spans nodes: a host on each, with all ranks or none.

The ranks of one engine compute in lockstep and cannot replace each other, so there is no partial engine. The node of
rank 0 asks every other node for its rank, in one nursery with its own host: whichever rank ends first ends all, and the
supervisor of rank 0 starts them again. The other nodes run their ranks exactly as long as they are asked to, and each
runs what its own file says: no node may take a command line from another. A rank of an earlier life must be gone before
a new one starts, since it could join the new rank 0.
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
from protocol.messages.engine import Done
from protocol.messages.operations import RankStarted, RunRank
from supervisor.cluster.directory import Directory
from supervisor.config.schema import Cluster
from supervisor.engines.sglang.bootstrap_ports import NextPort
from supervisor.engines.sglang.section import SglangSection
from supervisor.links.link import Link
from supervisor.supervision.registration import Registration

log = logging.getLogger(__name__)

RankCall: TypeAlias = Call[RunRank, RankStarted, Done]

# The keys of an engine that may differ between the files of its nodes.
NODE_LOCAL_KEYS = {"environment", "deadlines", "start_within_s", "silent_s"}


def host_address(host: str) -> str:
    """Return the address of a host that the file names."""
    return "127.0.0.1" if host == "localhost" else host


def rank0_address(cluster: Cluster, name: str) -> str | None:
    """Return host and port at which the ranks of an engine join rank 0, None for an engine on one node."""
    section = cluster.engine[name]
    if not isinstance(section, SglangSection) or not section.ranks_on:
        return None
    host = host_address(cluster.node[section.node].host)
    return f"[{host}]:{section.dist_port}" if ":" in host else f"{host}:{section.dist_port}"


def shared_keys(cluster: Cluster, name: str) -> dict[str, str]:
    """Return the keys that the files of all nodes of an engine must agree about, with their values as JSON."""
    section = cluster.engine[name]
    values = {key: value for key, value in asdict(section).items() if key not in NODE_LOCAL_KEYS}
    if isinstance(section, SglangSection):  # each node's file says by itself what encodes
        values["vision"] = "tower" if section.has_tower(cluster) else "embeddings"
    values[f"node.{section.node}.host"] = host_address(cluster.node[section.node].host)
    return {key: msgspec.json.encode(value, order="deterministic").decode() for key, value in values.items()}


# On the node of rank 0 -------------------------------------------------------------------------


class RunHost(Protocol):
    """Runs the host of rank 0, and so the engine."""

    async def __call__(self, port: int | None, *, task_status: trio.TaskStatus[None]) -> None:
        """Run it until it ends, with the bootstrap port `port` if it is a prefill; raises `ActorError` then."""


@define(eq=False)
class FollowerRanks:
    """The other nodes of an engine, as the node of rank 0 asks them for their ranks."""

    engine: str
    nodes: Sequence[str]  # from rank 1 on
    agreed: dict[str, str]
    directory: Directory
    linked_within_s: float
    registration: Registration[Engine]  # where it is reported what the engine waits for
    gateways: frozenset[str]  # the nodes whose clients it serves

    async def run_all(  # noqa: ASYNC128  # run_host calls started()
        self, run_host: RunHost, next_port: NextPort, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Run all ranks of the engine: rank 0 by `run_host`, which calls `started()`, and the others on their nodes.

        `next_port` returns the bootstrap port of this life. Raises `StartFailed` if another node cannot be asked or
        refuses, `EngineDied` when any other rank ends, and what `run_host` and `next_port` raise.
        """
        links = await self._linked()
        port = await next_port()
        failures: list[ActorError] = []

        def ended(error: ActorError) -> None:
            failures.append(error)
            nursery.cancel_scope.cancel(reason="all ranks or none")

        async with trio.open_nursery() as nursery:
            try:
                nursery.start_soon(self._drain, ended)
                # A rank of an earlier life must be gone on each node first: it could join the new rank 0.
                for rank, link in enumerate(links, 1):
                    await nursery.start(self._run_rank, rank, link, port, ended)
                await run_host(port, task_status=task_status)
            except ActorError as error:
                ended(error)  # raised below: here, the nursery would wrap it in a group
        raise failures[0]

    async def _run_rank(
        self,
        rank: int,
        link: Link,
        port: int | None,
        ended: Callable[[ActorError], None],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """Have another node run its rank; `started()` when it begins. Raises `StartFailed` before, ends all after."""
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

    async def _drain(self, ended: Callable[[ActorError], None]) -> None:
        """End the engine once another of its nodes drains: it gets no more requests, and the running ones may finish.

        That node waits for it, as long as its drain may take. If it is a gateway's, it has admitted some requests:
        they are still given to the engine.
        """
        while (lacks := self._lacks()) is None or self.directory.draining:
            await self.directory.wait_changed()
        log.info("giving way", extra={"engine": self.engine, "reason": lacks})
        if self.registration.current is not None:
            self.registration.set_blocked_by(lacks)
            own_gateways = self.gateways & {*self.nodes}
            if not any(self.directory.node(name).state.draining for name in own_gateways):
                self.registration.withdraw()
            await self.directory.wait_worker_idle(self.engine)
        ended(EngineDied(f"engine {self.engine} gave way: {lacks}"))

    async def _linked(self) -> list[Link]:
        """Wait for links to the other nodes; raises `StartFailed` if it takes too long."""
        lacks = self._lacks()
        try:
            with trio.move_on_after(self.linked_within_s):
                while lacks is not None:
                    if lacks != self.registration.blocked_by:
                        log.info("waiting", extra={"engine": self.engine, "reason": lacks})
                        self.registration.set_blocked_by(lacks)
                    await self.directory.wait_changed()
                    lacks = self._lacks()
        finally:
            self.registration.set_blocked_by(None)
        if lacks is not None:
            raise StartFailed(f"engine {self.engine} spans {len(self.nodes) + 1} nodes: {lacks}")
        return [link for name in self.nodes if (link := self.directory.node(name).link) is not None]

    def _lacks(self) -> str | None:
        """Return which of the other nodes cannot be asked now, and why, None if all can."""
        for name in self.nodes:
            node = self.directory.node(name)
            if node.link is None or node.link.lost:
                return f"there is no link to node {name}"
            if node.state.draining:
                return f"node {name} drains"
        return None


# On the other nodes --------------------------------------------------------------------


@frozen
class LocalRank:
    """This node's rank of an engine, as its own file describes it."""

    directory: Directory
    agreed: Mapping[str, str]
    ports: Container[int | None] = (None,)  # bootstrap ports that a life of the engine may have

    def validate(self, request: RunRank) -> None:
        """Raise `BadRequest` if the asker's file differs: the ranks would not be of one engine.

        Raises `Draining` if this node drains.
        """
        if self.directory.draining:
            raise Draining(f"node {self.directory.name} drains")
        differ = [key for key, value in self.agreed.items() if request.agreed.get(key) != value]
        if request.agreed.keys() - self.agreed.keys():
            differ.append("keys that are unknown here")
        if differ:
            raise BadRequest(f"the file of node {self.directory.name} disagrees about {', '.join(differ)}")
        if (port := request.bootstrap_port) not in self.ports:
            wanted = "no bootstrap port" if port is None else f"bootstrap port {port}"
            raise BadRequest(f"the file of node {self.directory.name} does not allow it {wanted}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the rank as running, for a drain of this node."""
        self.directory.follower_ranks += 1
        try:
            yield
        finally:
            self.directory.follower_ranks -= 1
            self.directory.notify()


async def run_follower_rank(
    inbox: Inbox[RankCall],
    rank: LocalRank,
    run_host: Callable[[int | None], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run this node's rank of an engine whenever it is asked for, one at a time: the next waits until the last is gone.

    `run_host` runs the host, with the bootstrap port of the request, until it ends, and then raises `ActorError`.
    """
    bugs = BugCounter()
    task_status.started()
    while True:
        call = await inbox.receive()
        with rank.running(), call.answering(bugs) as answer:
            rank.validate(call.request)
            answer.put(RankStarted())
            try:
                await run_host(call.request.bootstrap_port)
            except ActorError as error:  # the asker handles it, and starts all ranks again
                raise EngineLost(str(error)) from error
