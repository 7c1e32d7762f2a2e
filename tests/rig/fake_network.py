"""A scripted network in virtual time, and fetches over it."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network

import trio
import trio.testing
from attrs import Factory, define

from actors.media.media import Allowance
from supervisor.config.media import parse_host
from supervisor.media.addresses import IpAddress
from supervisor.media.contents import StoredContent
from supervisor.media.fetching import Fetcher, FetchRules
from supervisor.media.files import MediaFiles
from tests.rig.media import open_descriptors

Stream = trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream]
Serve = Callable[[Stream], Awaitable[None]]
BODY = b"\x89PNG" + bytes(5_000)


@define(eq=False)
class FakeNetwork:
    """Names with one answer after another, and servers by address and port; it records what was dialed."""

    nursery: trio.Nursery
    names: dict[str, list[list[str]]] = Factory(dict)
    servers: dict[tuple[str, int], Serve] = Factory(dict)
    dialed: list[str] = Factory(list)
    resolved: list[str] = Factory(list)
    resolve_s: float = 0.0
    connect_s: float = 0.0
    error: OSError | None = None

    async def resolve(self, host: str, port: int, *, owner: str, within_s: float) -> Sequence[IpAddress]:
        self.resolved.append(host)
        with trio.fail_after(within_s):
            await trio.sleep(self.resolve_s)
        if host not in self.names:
            raise OSError(-2, "Name or service not known")
        answers = self.names[host]
        return [ip_address(text) for text in (answers.pop(0) if len(answers) > 1 else answers[0])]

    async def connect(self, address: IpAddress, port: int) -> trio.abc.Stream:
        self.dialed.append(f"{address} {port}")
        await trio.sleep(self.connect_s)
        if self.error is not None:
            raise self.error
        if (serve := self.servers.get((str(address), port))) is None:
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = trio.testing.memory_stream_pair()
        self.nursery.start_soon(serve, theirs)
        return ours


async def request_of(stream: trio.abc.Stream) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        if not (data := await stream.receive_some(1000)):
            return head
        head += bytes(data)
    return head


def answering(*pieces: bytes, every_s: float = 0.0, closes: bool = True) -> Serve:
    """Return a server that sends pieces, whoever asks for whatever."""

    async def serve(stream: Stream) -> None:
        await request_of(stream)
        try:
            for piece in pieces:
                await stream.send_all(piece)
                await trio.sleep(every_s)
        except trio.BrokenResourceError:
            return
        if closes:
            await stream.aclose()

    return serve


def ok(body: bytes = BODY, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


@define(eq=False)
class FetchRig:
    network: FakeNetwork
    fetcher: Fetcher

    async def fetch(self, url: str) -> bytes:
        """Check and fetch as the media actor does, and return the bytes."""
        self.fetcher.source(url)
        content = await self.fetcher.fetch(url, Allowance(self.fetcher.rules.bytes_max, "alice"))
        try:
            return read(content)
        finally:
            content.close()


def read(content: StoredContent) -> bytes:
    return os.pread(content.descriptor, content.size_bytes + 1, 0)


HOSTS = ("a.example", "b.example", "*.wild.example", "8.8.8.8", "127.0.0.1", "[::1]", "localhost")


@asynccontextmanager
async def running(
    hosts: Sequence[str] = HOSTS, networks: Sequence[str] = (), tls: ssl.SSLContext | None = None
) -> AsyncIterator[FetchRig]:
    before = open_descriptors()
    async with trio.open_nursery() as nursery:
        network = FakeNetwork(nursery)
        network.names["a.example"] = [["8.8.8.8"]]
        network.names["b.example"] = [["9.9.9.9"]]
        rules = FetchRules(
            hosts=[pattern for host in hosts if (pattern := parse_host(host)) is not None],
            networks=[ip_network(text) for text in networks],
            bytes_max=10_000,
            redirects_max=2,
            fetch_s=20.0,
            agent="espalier/test",
        )
        files = MediaFiles(None, 5.0)
        yield FetchRig(network, Fetcher(rules, network, files, tls or ssl.create_default_context(), os.close))
        nursery.cancel_scope.cancel()
    assert open_descriptors() == before
