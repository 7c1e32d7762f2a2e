"""Nodes without gateway and engines, linked over real sockets of loopback, and connections that prove nothing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, cast

import trio
from attrs import Factory, define, field
from trio.testing import wait_all_tasks_blocked

from actors.engines import port
from actors.kit.calls import Askable
from protocol.errors import RequestError
from protocol.link.frames import VERSION, Hello, encode
from protocol.link.greeting import Greeter
from protocol.messages.cluster import Leg, Offer
from protocol.messages.generation import Finished, FinishReason, Generate, Started, Tokens, Usage
from protocol.messages.kind import Message
from supervisor.cluster.directory import Directory
from supervisor.cluster.link_settings import LinkSettings
from supervisor.cluster.mesh import Mesh
from supervisor.cluster.workers import LocalWorker
from supervisor.links import websocket
from supervisor.links.endpoint import Endpoint
from supervisor.links.link import Link
from supervisor.links.tls import LinkTls
from supervisor.supervision.registration import Registration
from tests.rig.calls import AnyAnswer, AnyCall, priority_inbox
from tests.rig.fake_engine import generate
from tests.rig.links import idle_link, serve

QUICK = LinkSettings(
    name="grove", heartbeat_s=0.1, silent_s=0.5, handshake_s=5.0, announce_s=0.01, retry_min_s=0.02, retry_max_s=0.2
)
SECRET = b"a secret that is long enough to be one"
LOOPBACK = "127.0.0.1"
WITHIN_S = 60.0
Reasons = Callable[[], list[str]]  # the fixture `reasons`
UPGRADE = (
    b"GET /link HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


def linked_directory() -> tuple[Directory, Link]:
    """Return the directory of node `here` with a link to node `far`, and that link."""
    directory, link = Directory("here"), idle_link()
    directory.linked("far", link)
    return directory, link


def unlink(directory: Directory, node: str) -> None:
    """Remove the link to a node from the directory of another."""
    link = directory.nodes[node].link
    assert link is not None
    directory.unlinked(node, link)


def add_worker(directory: Directory, name: str = "here", *, slots: int = 2, inbox_size: int = 2) -> LocalWorker:
    """Give a node one more worker, whose engine is down."""
    address, inbox = priority_inbox(inbox_size, lambda request: request.priority)
    offer, engine = Offer(name, "oak", Leg.BOTH, slots, up=False), Registration[port.Engine](directory.notify)
    worker = directory.local[name] = LocalWorker(
        node=directory.name,
        idle_offer=offer,
        address=address,
        engine=engine,
        inbox=inbox,
        directory=directory,
    )
    return worker


@asynccontextmanager
async def queued_requests(worker: LocalWorker, count: int) -> AsyncIterator[list[type[RequestError]]]:
    """Let requests wait at a worker that serves none, and yield the errors with which they fail."""
    failed: list[type[RequestError]] = []

    async def ask() -> None:
        try:
            async with worker.ask(generate(), 9) as replies:
                await replies.result()
        except RequestError as error:
            failed.append(type(error))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        yield failed
        nursery.cancel_scope.cancel()


async def count_tokens(call: AnyCall, answer: AnyAnswer, step_s: float) -> None:
    """Answer a Generate with as many tokens as it may have, 0, 1, 2 and so on, one each step."""
    tokens_max = call.request.sampling.tokens_max
    answer.put(Started(), 0)
    for number in range(tokens_max):
        await trio.sleep(step_s)
        answer.put(Tokens((number,)))
    answer.end(Finished(FinishReason.LENGTH, Usage(1, tokens_max)))


class Engine:
    """An engine that is nothing but its limits."""

    info = submit = abort = wait_released = wait_lost = load = held_up = operate = cast("Any", None)
    watch_blocks = watch_load = cast("Any", None)


@define(eq=False)
class Node:
    """One node with one worker, which records the requests that it has begun and ended."""

    name: str
    section: LinkSettings = QUICK
    secret: bytes = SECRET
    port: int | None = 0
    host: str = LOOPBACK
    tls: LinkTls | None = None
    join: tuple[str, ...] = ()
    step_s: float = 0.0
    directory: Directory = field(init=False)
    worker: LocalWorker = field(init=False)
    links: Mesh = field(init=False)
    asked: list[str] = Factory(list)
    freed: list[str] = Factory(list)
    scope: trio.CancelScope = Factory(trio.CancelScope)

    def __attrs_post_init__(self) -> None:
        self.directory = Directory(self.name)
        self.worker = add_worker(self.directory, f"{self.name}-0", slots=8, inbox_size=8)
        numbers = count(1)
        self.links = Mesh(
            name=self.name,
            section=self.section,
            directory=self.directory,
            services={(self.worker.name, Generate): cast("Askable[Message, Message, Message]", self.worker)},
            listen=None if self.port is None else Endpoint(self.host, self.port),
            secret=self.secret,
            tls=self.tls,
            new_nonce=lambda: f"{id(self)} {next(numbers)}".encode().ljust(32),
            chance=random.Random(self.name),
            join=tuple(map(Endpoint.read, self.join)),
        )

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.links.port}"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.read(self.address)

    def knows(self, *others: Node) -> None:
        """Record other nodes as those of cluster.toml."""
        for other in others:
            self.directory.configure(other.name, None if other.links.port is None else other.address)
        self.directory.notify()

    @property
    def linked(self) -> set[str]:
        return {name for name, node in self.directory.nodes.items() if node.link is not None}

    def link(self, other: Node) -> Link | None:
        return self.directory.nodes[other.name].link

    def offers_of(self, other: Node) -> list[Offer]:
        return [offer for offer in self.directory.offers() if offer.name == other.worker.name]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.scope = trio.CancelScope()
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, self.worker.inbox, self._answer)
                with self.worker.engine.publish(Engine()):
                    await self.links.run(task_status=task_status)

    async def _answer(self, call: AnyCall, answer: AnyAnswer) -> None:
        self.asked.append(call.request.id)
        try:
            await count_tokens(call, answer, self.step_s)
        finally:
            self.freed.append(call.request.id)

    async def ask(self, other: Node, tokens_max: int = 3, request_id: str = "r") -> list[int]:
        """Ask another node's worker, and return the token ids of its answer."""
        workers = {worker.load.name: worker for worker in self.directory.all_workers()}
        ids: list[int] = []
        request = generate(request_id, tokens_max=tokens_max)
        async with workers[f"{other.name}/{other.worker.name}"].ask(request, tokens_max) as replies:
            async for reply in replies:
                if isinstance(reply, Tokens):
                    ids += reply.ids
        return ids


@asynccontextmanager
async def linked_nodes(*nodes: Node, know: bool = True) -> AsyncIterator[trio.Nursery]:
    """Run nodes; with `know` each has the others in its cluster.toml."""
    close_s = websocket.CLOSE_S
    try:
        async with trio.open_nursery() as nursery:
            for node in nodes:
                await nursery.start(node.run)
            if know:
                for node in nodes:
                    node.knows(*(other for other in nodes if other is not node))
            yield nursery
            websocket.CLOSE_S = 0.0  # all nodes end in one turn: each would wait in vain for the others to close
            nursery.cancel_scope.cancel()
    finally:
        websocket.CLOSE_S = close_s


@asynccontextmanager
async def linked_pair(*, a_step_s: float = 0.0, b_step_s: float = 0.0) -> AsyncIterator[tuple[Node, Node]]:
    """Run nodes `a` and `b`, and yield them once they are linked."""
    a, b = Node("a", step_s=a_step_s), Node("b", step_s=b_step_s)
    async with linked_nodes(a, b):
        await all_linked(a, b)
        yield a, b


@asynccontextmanager
async def undisturbed() -> AsyncIterator[Node]:
    """Run node `a`, which answers node `b` meanwhile; afterwards the answer is whole, and `b` its only link."""
    answers: list[list[int]] = []

    async def ask() -> None:
        answers.append(await b.ask(a, tokens_max=30))

    async with linked_pair(a_step_s=0.01) as (a, b), trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        yield a
        await until(lambda: answers)
        assert answers == [list(range(30))]
        await until(lambda: a.linked == {"b"} and not a.links.statistics().unauthenticated)
        assert a.directory.running == 0


async def until(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Wait until a condition is true."""
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110  # tests alone wait so
            await trio.sleep(0.02)


async def all_linked(*nodes: Node) -> None:
    """Wait until nodes have links to each other, and know each other's workers."""
    names = {node.name for node in nodes}
    await until(lambda: all(names - {node.name} <= node.linked for node in nodes))
    await until(lambda: all(len(node.directory.workers("oak")) >= len(nodes) for node in nodes))


@asynccontextmanager
async def raw_connection(node: Node, data: bytes = b"") -> AsyncIterator[trio.SocketStream]:
    """Open a connection to a node and send `data`; what follows a WebSocket upgrade is sent after its response."""
    assert node.links.port is not None
    stream = await trio.open_tcp_stream(LOOPBACK, node.links.port)
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


async def read_to_end(stream: trio.SocketStream) -> bytes:
    """Read until the other end closes, and return what came."""
    received = b""
    with trio.fail_after(WITHIN_S), suppress(trio.BrokenResourceError):
        while data := await stream.receive_some():
            received += data
    return received


async def dial(node: Node, handler: Callable[[websocket.WebSocketTransport], Awaitable[None]]) -> None:
    """Open a WebSocket to a node, for what comes before a link."""
    await websocket.dial(node.endpoint, None, WITHIN_S, handler)


async def link_by_hand(
    node: Node, name: str, *messages: bytes, hello: bool = True, close_after_s: float | None = None
) -> None:
    """Link with a node under a name and send messages, then close, or wait until the node does."""
    greeter = Greeter("dials", "grove", name, SECRET, f"{name} nonce".encode().ljust(32))

    async def send(transport: websocket.WebSocketTransport) -> None:
        await websocket.greet(transport, greeter, WITHIN_S)
        with suppress(trio.BrokenResourceError):
            for message in ((encode(Hello(VERSION, name, 8)),) if hello else ()) + messages:
                await transport.send_all(message)
        if close_after_s is not None:
            await trio.sleep(close_after_s)
            await transport.socket.aclose()
        with trio.fail_after(WITHIN_S):
            while await transport.receive_some():
                pass

    await dial(node, send)
