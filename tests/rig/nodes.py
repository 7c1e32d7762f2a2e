"""Nodes without gateway and engines, linked over real sockets of loopback, and connections that prove nothing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count

import trio
from attrs import Factory, define, field

from actors.kit.calls import BugCounter, mailbox
from protocol.cluster import Leg, Offer
from protocol.frames import VERSION, Hello, encode
from protocol.greeting import Greeter
from protocol.messages import Finished, FinishReason, Generate, Started, Tokens, Usage
from supervisor.cluster.directory import Directory
from supervisor.cluster.mesh import Mesh
from supervisor.cluster.workers import LocalWorker
from supervisor.config.load import ClusterSection
from supervisor.links import websocket
from supervisor.links.endpoint import Endpoint
from supervisor.links.link import Link
from supervisor.supervision.registration import Registration
from tests.rig.fake_engine import generate

QUICK = ClusterSection(
    name="grove", heartbeat_s=0.1, silent_s=0.5, handshake_s=1.0, tell_s=0.01, retry_min_s=0.02, retry_max_s=0.2
)
SECRET = b"a secret that is long enough to be one"
LOOPBACK_HOSTS = "127.0.0.1"
WITHIN_S = 5.0
UPGRADE = (
    b"GET /link HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


@define(eq=False)
class Node:
    """One node that serves one worker, whose answers count up slowly."""

    name: str
    section: ClusterSection = QUICK
    secret: bytes = SECRET
    port: int | None = 0
    host: str = LOOPBACK_HOSTS
    tls: object = None
    join: tuple[str, ...] = ()
    step_s: float = 0.0
    directory: Directory = field(init=False)
    links: Mesh = field(init=False)
    asked: list[str] = Factory(list)
    freed: list[str] = Factory(list)
    scope: trio.CancelScope = Factory(trio.CancelScope)
    _inbox: object = None

    def __attrs_post_init__(self) -> None:
        self.directory = Directory(self.name)
        address, self._inbox = mailbox(8)
        offer = Offer(f"{self.name}-0", "oak", Leg.BOTH, 8, up=False)
        plug = Registration(self.directory.notify)
        self.directory.local[offer.name] = LocalWorker(self.name, offer, address, plug, self._inbox, self.directory)
        numbers = count(1)
        self.links = Mesh(
            name=self.name,
            section=self.section,
            directory=self.directory,
            services={(offer.name, Generate): self.directory.local[offer.name]},
            listen=None if self.port is None else Endpoint(self.host, self.port),
            secret=self.secret,
            tls=self.tls,
            new_nonce=lambda: f"{id(self)} {next(numbers)}".encode().ljust(32),
            chance=random.Random(self.name),
            join=tuple(map(Endpoint.read, self.join)),
        )

    @property
    def at(self) -> str:
        return f"{LOOPBACK_HOSTS}:{self.links.port}"

    def knows(self, *others: Node) -> None:
        for other in others:
            listens = other.links.port is not None
            self.directory.configure(other.name, other.at if listens else None)
        self.directory.notify()

    @property
    def linked(self):
        return {name for name, node in self.directory.nodes.items() if node.link is not None}

    def link(self, other: Node) -> Link | None:
        return self.directory.nodes[other.name].link

    def offers_of(self, other: Node):
        return [each for each in self.directory.offers() if each.name == f"{other.name}-0"]

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        self.scope = trio.CancelScope()
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve)
                plug = self.directory.local[f"{self.name}-0"].engine
                with plug.publish(Engine()):
                    await self.links.run(task_status=task_status)

    async def _serve(self) -> None:
        bugs = BugCounter()

        async def one(call) -> None:
            with call.answering(bugs) as answer:
                self.asked.append(call.request.id)
                try:
                    answer.put(Started(), 0)
                    for number in range(call.request.sampling.tokens_max):
                        await trio.sleep(self.step_s)
                        answer.put(Tokens([number]))
                    answer.end(Finished(FinishReason.LENGTH, Usage(1, call.request.sampling.tokens_max)))
                finally:
                    self.freed.append(call.request.id)

        async with trio.open_nursery() as nursery:
            async for call in self._inbox:  # type: ignore[attr-defined]
                nursery.start_soon(one, call)

    async def ask(self, other: Node, tokens_max: int = 3, request_id: str = "r") -> list[int]:
        """Ask another node's worker, and return the token ids of its answer."""
        worker = next(each for each in self.directory.all_workers() if each.load.name == f"{other.name}/{other.name}-0")
        ids = []
        async with worker.ask(generate(request_id, tokens_max=tokens_max), tokens_max) as replies:
            async for reply in replies:
                if isinstance(reply, Tokens):
                    ids += reply.ids
        return ids


class Engine:
    """An engine that is nothing but its limits."""

    info = None


@asynccontextmanager
async def linked_nodes(*nodes, know: bool = True) -> AsyncIterator[trio.Nursery]:
    """Run nodes that are all linked to each other."""
    async with trio.open_nursery() as nursery:
        for node in nodes:
            await nursery.start(node.run)
        if know:
            for node in nodes:
                node.knows(*(other for other in nodes if other is not node))
        yield nursery
        nursery.cancel_scope.cancel()


async def until(true, within_s: float = WITHIN_S) -> None:
    """Wait until something is true."""
    with trio.fail_after(within_s):
        while not true():  # noqa: ASYNC110  # tests alone wait so
            await trio.sleep(0.005)


async def all_linked(*nodes) -> None:
    names = {node.name for node in nodes}
    await until(lambda: all(names - {node.name} <= node.linked for node in nodes))
    await until(lambda: all(len(node.directory.workers("oak")) >= len(nodes) for node in nodes))


@asynccontextmanager
async def raw_connection(node: Node, data=b"") -> AsyncIterator[trio.SocketStream]:
    """Open a connection to a node and send `data`; what follows a WebSocket upgrade is sent after its response."""
    stream = await trio.open_tcp_stream(LOOPBACK_HOSTS, node.links.port)
    async with stream:
        if data.startswith(UPGRADE):
            await stream.send_all(UPGRADE)
            answer = b""
            with trio.fail_after(WITHIN_S):
                while b"\r\n\r\n" not in answer:
                    answer += await stream.receive_some()
            assert b" 101 " in answer
            data = data.removeprefix(UPGRADE)
        if data:
            await stream.send_all(data)
        yield stream


async def ended(stream: trio.SocketStream, within_s: float = WITHIN_S) -> bytes:
    """Read until the other end closes, and return what came."""
    said = b""
    with trio.fail_after(within_s):
        while True:
            try:
                data = await stream.receive_some()
            except trio.BrokenResourceError:
                return said
            if not data:
                return said
            said += data


async def handshake_as_peer(node: Node, name: str, say, *, hello: bool = True) -> bytes:
    """Complete the handshake as a node does, then send `data`, and return what the other node sent at last."""
    numbers = count()
    greeter = Greeter("dials", "grove", name, SECRET, f"{name} {next(numbers)} nonce".encode().ljust(32))
    heard = []

    async def talk(wire: websocket.WebSocketTransport) -> None:
        await websocket.greet(wire, greeter, 1.0)
        if hello:
            await wire.send_all(encode(Hello(VERSION, name, 8)))
        with suppress(trio.BrokenResourceError):
            await say(wire)
        with trio.move_on_after(WITHIN_S) as patience:
            while data := await wire.receive_some():
                heard.append(data)
        assert not patience.cancelled_caught, "the link was kept"

    await websocket.dial(Endpoint(LOOPBACK_HOSTS, node.links.port), None, 1.0, talk)
    return b"".join(heard)
