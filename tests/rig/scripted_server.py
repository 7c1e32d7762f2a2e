"""A small HTTP and WebSocket server that follows a script, well or badly, and records each request."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, cast

import trio
from attrs import define, field
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Ping, Request, TextMessage

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Json: TypeAlias = dict[str, Any]
Stream: TypeAlias = trio.SocketStream | trio.SSLStream[trio.SocketStream]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: object, name: str | None = None) -> bytes:
    data = body if isinstance(body, str) else json.dumps(body)
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


def delta(text: str | None = None, finish: object = None, **more: object) -> Json:
    return {"choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}], **more}


def usage(prompt: int, output: int) -> Json:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def chat_events(tokens: int) -> list[bytes]:
    """Return the events of a complete chat answer."""
    first = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    words = [event(delta("w")) for _ in range(tokens)]
    return [first, *words, event(delta(finish="length")), event(usage(7, tokens)), event("[DONE]")]


def response_end(kind: str, tokens: int = 0, **more: object) -> Json:
    usage = {"input_tokens": 7, "output_tokens": tokens, "input_tokens_details": {"cached_tokens": 3}}
    return {"type": f"response.{kind}", "response": {"status": kind, "usage": usage, **more}}


@define(eq=False)
class Asked:
    """One request, and the stream to answer it on."""

    body: Json
    headers: dict[str, str]
    path: str
    stream: Stream

    async def send(self, *parts: bytes) -> None:
        await self.stream.send_all(b"".join(parts))

    async def gone(self) -> bool:
        """Wait until the client has left."""
        with suppress(trio.BrokenResourceError):
            return not await self.stream.receive_some()
        return True


Script: TypeAlias = Callable[[Asked], Awaitable[None]]
SocketEvent: TypeAlias = TextMessage | CloseConnection | Ping
SocketScript: TypeAlias = Callable[[Json], list[SocketEvent]]  # what to say


async def whole(asked: Asked) -> None:
    """Answer as a conforming server does."""
    await asked.send(HEAD, *map(chunk, chat_events(asked.body["max_tokens"])), b"0\r\n\r\n")


async def nothing(asked: Asked) -> None:
    """Send nothing, and record that the client leaves."""
    await asked.gone()


def saying(*parts: bytes, close: bool = True) -> Script:
    """Answer every request with these bytes."""

    async def script(asked: Asked) -> None:
        await asked.send(*parts)
        if close:
            await asked.stream.aclose()

    return script


@define(eq=False)
class Scripted:
    """What the server has recorded so far."""

    script: Script | SocketScript
    port: int = 0
    bodies: list[Json] = field(factory=list)
    headers: list[dict[str, str]] = field(factory=list)
    connections: int = 0
    left: int = 0
    at_once: bool = False  # a WebSocket's events are sent together

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, stream: Stream) -> None:
        self.connections += 1
        buffer = b""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with stream:
                while True:
                    while b"\r\n\r\n" not in buffer:
                        if not (data := await stream.receive_some()):
                            return
                        buffer += data
                    head, _, buffer = buffer.partition(b"\r\n\r\n")
                    first, *lines = head.decode().split("\r\n")
                    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                    self.headers.append(headers)
                    if headers.get("upgrade") == "websocket":
                        await self.socket(stream, head + b"\r\n\r\n")
                        return
                    size = int(headers["content-length"])
                    while len(buffer) < size:
                        buffer += await stream.receive_some()
                    body, buffer = json.loads(buffer[:size]), buffer[size:]
                    self.bodies.append(body)
                    try:
                        await cast("Script", self.script)(Asked(body, headers, first.split()[1], stream))
                    except trio.BrokenResourceError:
                        self.left += 1
                        raise

    async def socket(self, stream: Stream, head: bytes) -> None:
        """Serve a WebSocket with a library that is not the one under test."""
        protocol = WSConnection(ConnectionType.SERVER)
        protocol.receive_data(head)
        while True:
            for event in protocol.events():
                match event:
                    case Request():
                        await stream.send_all(protocol.send(AcceptConnection()))
                    case TextMessage():
                        body = json.loads(event.data)
                        self.bodies.append(body)
                        sent = cast("SocketScript", self.script)(body)
                        for part in [b"".join(map(protocol.send, sent))] if self.at_once else map(protocol.send, sent):
                            await stream.send_all(part)
                        if isinstance(sent[-1], CloseConnection):
                            while await stream.receive_some():
                                pass  # to close with a pong unread would reset the connection
                            return
            data = await stream.receive_some()
            if not data:
                self.left += 1
                return
            protocol.receive_data(bytes(data))


@asynccontextmanager
async def scripted(
    script: Script | SocketScript, *, at_once: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Scripted]:
    """Run a server on a free port."""
    server = Scripted(script, at_once=at_once)
    async with trio.open_nursery() as nursery:
        if tls is None:
            serve: partial[Any] = partial(trio.serve_tcp, server.serve, 0, host="127.0.0.1")
            server.port = (await nursery.start(serve))[0].socket.getsockname()[1]
        else:
            serve = partial(trio.serve_ssl_over_tcp, server.serve, 0, tls, host="127.0.0.1")
            server.port = (await nursery.start(serve))[0].transport_listener.socket.getsockname()[1]
        yield server
        nursery.cancel_scope.cancel()
