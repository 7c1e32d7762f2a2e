"""A gateway on loopback: the real HTTP and WebSocket code and the real processor, over a worker that its prompts script."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import trio
from attrs import Factory, define, field, frozen

from actors.kit.calls import Address, Answer, mailbox
from actors.kit.direct import DirectAddress, DirectCalls
from actors.kit.fast_path import put_token
from actors.kit.offload import run_inline
from actors.processor import TextReply, TextRequest, TextResult, processor
from actors.text.engine_grammar import engine_grammar
from actors.text.limits import PromptLimits
from actors.text.model import TextModel, load
from protocol.dialects.http import Model
from protocol.dialects.responses import FINAL_EVENTS
from protocol.dialects.targets import ITL_FIELD, TTFT_FIELD
from protocol.errors import EngineLost
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import (
    Finished,
    FinishReason,
    Generate,
    Grammar,
    GrammarKind,
    RouteTaken,
    Started,
    Tokens,
    Usage,
    one_token,
)
from protocol.model_folder import FILES
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.routes import ROUTES, RouteTable
from supervisor.gateway.keys.keys import Keys
from supervisor.gateway.limits import GatewayLimits
from supervisor.gateway.listening import GatewayPort
from supervisor.gateway.origins import Origins
from supervisor.gateway.ports import NO_ADMINISTRATION, GatewayRuntime, Probes
from supervisor.gateway.requests import RequestRunner, ServedModel
from supervisor.gateway.server import serve
from supervisor.telemetry.metrics import Metrics
from tests.rig.fake_engine import logprob_at
from tests.rig.prompt_scores import scores_of

FOLDER = Path(__file__).parents[2] / "examples" / "tiny"
load_with_fixed_clock = partial(load, strftime=lambda form: time.strftime(form, time.gmtime(43_200)), salt="")
CONTENTS_OF_TINY = {name: (FOLDER / name).read_bytes() for name in FILES if (FOLDER / name).is_file()}
TINY: TextModel = load_with_fixed_clock(CONTENTS_OF_TINY)
INFO = EngineInfo("fake", "1", 512, 2048, 65_536, 2048, 16, 16, honours_seed=False, grammars=tuple(GrammarKind))
LINE = "The oak is old, wörld. 日本 🙂 "
SECRET = "quetzalcoatl"  # put into prompts and answers, and looked for in logs


def ids(text: str) -> list[int]:
    return TINY.tokenizer.encode(text, add_special_tokens=False).ids


@define(eq=False)
class Worker:
    """A worker that repeats one line; `n=9 s=0.5 fail=3` in a prompt sets tokens, seconds between them, and where it fails."""

    asked: list[Generate] = Factory(list)
    prompts: list[str] = Factory(list)
    running: int = 0
    left: int = 0  # whose asker left before the end
    cached: int = 0
    route: RouteTaken | None = None
    line: str = LINE
    mute: bool = False  # nothing comes at all
    matched: int | None = None  # the stop token of every whole answer
    version: str = ""  # of its weights
    renewed: dict[int, str] = Factory(dict)  # other versions, by the number of tokens before them
    began: trio.Event = Factory(trio.Event)

    async def wait_left(self, count: int = 1) -> None:
        """Wait until so many askers have left before the end."""
        while self.left < count:  # noqa: ASYNC110  # a fake has no event for it
            await trio.sleep(0.01)

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Answer[Started | Tokens, Finished]]:
        assert credit >= request.sampling.tokens_max
        self.asked.append(request)
        self.running += 1
        answer: Answer[Started | Tokens, Finished] = Answer(credit)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer, request, answer)
                yield answer
                nursery.cancel_scope.cancel()
        finally:
            self.running -= 1
            self.left += not answer.over.is_set()

    async def _answer(self, request: Generate, answer: Answer[Started | Tokens, Finished]) -> None:
        prompt = TINY.tokenizer.decode(request.tokens)
        self.prompts.append(prompt)
        script = dict(re.findall(r"\b(n|s|fail)=([0-9.]+)", prompt.rpartition("<|im_start|>user")[2] or prompt))
        wanted = min(int(script.get("n", 5)), request.sampling.tokens_max)
        pace, fail = float(script.get("s", 0)), int(script.get("fail", -1))
        line = ids(self.line)
        if self.mute:
            await trio.sleep_forever()
        for place in range(wanted):
            await trio.sleep(pace)
            if place == fail:
                answer.fail(EngineLost("the engine that was answering died"))
                return
            if place == 0:
                start = Started(self.cached, self.route, scores=scores_of(request), version=self.version)
                answer.put(start, 0)
                self.began.set()
            elif place in self.renewed:
                answer.put(Tokens((), version=self.renewed[place]), 0)
            token = line[place % len(line)]
            if request.logprobs is None:
                put_token(answer, token, trio.current_time(), one_token)
            else:
                answer.put(Tokens((token,), (logprob_at(token, place, request.logprobs, 512),)), 1)
        reason = FinishReason.LENGTH if wanted == request.sampling.tokens_max else FinishReason.STOP
        answer.end(Finished(reason, Usage(len(request.tokens), wanted, self.cached), self.matched))


async def check_as_engines_do(grammar: Grammar, _: str, /, *, decided: bool = False) -> Grammar:
    """Decide a grammar without an engine that could compile it."""
    await trio.lowlevel.checkpoint()
    return grammar if decided else engine_grammar(grammar)


@define(eq=False)
class Rig:
    """A running gateway, its worker and its metrics."""

    gateway: Gateway
    worker: Worker
    metrics: Metrics
    port: int = 0
    ready: list[str] = Factory(list)  # reasons why it is not
    limits: list[PromptLimits | None] = field(factory=lambda: [PromptLimits(INFO, 2048, 2048)])

    _streams: list[trio.SocketStream] = Factory(list)

    async def connect(self, receive_buffer: int | None = None) -> trio.SocketStream:
        """Connect; the rig closes what the test leaves open."""
        stream = trio.SocketStream(trio.socket.socket())
        if receive_buffer is not None:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._streams.append(stream)
        await stream.socket.connect(("127.0.0.1", self.port))
        return stream

    def hang_up(self) -> None:
        for stream in self._streams:
            stream.socket.close()

    async def client(self, receive_buffer: int | None = None) -> Client:
        return Client(await self.connect(receive_buffer))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def gateway_rig(
    *,
    worker: Worker | None = None,
    model: TextModel | None = None,
    requests_max: int = 8,
    waiting_max: int = 8,
    admit_s: float = 5.0,
    first_token_s: float = 60.0,
    total_s: float = 600.0,
    routes: RouteTable = ROUTES,
    new_id: Callable[[], str] | None = None,
    shares_port: bool = False,
    **limits: Any,
) -> AsyncIterator[Rig]:
    """Serve the model `tiny` on a free port of loopback."""
    worker = worker or Worker()
    metrics = Metrics()
    asked: Address[TextRequest, TextReply, TextResult]
    asked, inbox = mailbox(requests_max)
    direct: DirectCalls[TextRequest, TextReply, TextResult] = DirectCalls()
    address = DirectAddress(asked.inbox, direct)
    numbers = count(1)
    unready: list[str] = []
    prompt_limits: list[PromptLimits | None] = [PromptLimits(INFO, 2048, 2048)]
    shown = Model("tiny", 7, "tiny", 2048, honours_seed=False)
    served = ServedModel(lambda: shown, address, lambda: 2048, frozenset({TTFT_FIELD, ITL_FIELD}))

    def why() -> str | None:
        return unready[0] if unready else None

    async def metrics_text() -> bytes:
        await trio.lowlevel.checkpoint()
        return metrics.render({})

    gateway = Gateway(
        runner=RequestRunner({"tiny": served}, metrics, first_token_s, total_s),
        gate=AdmissionGate(requests_max, admit_s, waiting_max, why),
        limits=attrs.evolve(GatewayLimits(), **limits),
        origins=Origins(frozenset({"127.0.0.1", "::1", "localhost"})),
        keys=Keys(),
        port=GatewayPort(shared=shares_port),
        runtime=GatewayRuntime(new_id=new_id or (lambda: f"{next(numbers):032x}"), now=lambda: 1_700_000_000.5),
        probes=Probes(unready=why, metrics_text=metrics_text),
        administration=NO_ADMINISTRATION,
    )
    rig = Rig(gateway, worker, metrics, ready=unready, limits=prompt_limits)
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(
                processor,
                inbox,
                model or TINY,
                worker,
                lambda: prompt_limits[0],
                run_inline,
                requests_max,
                check_as_engines_do,
                direct=direct,
            ),
            name="processor",
        )
        rig.port = await nursery.start(partial(serve, gateway, routes, "127.0.0.1", 0), name="gateway")
        try:
            yield rig
        finally:
            rig.hang_up()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def gateway_client(receive_buffer: int | None = None, **fields: Any) -> AsyncIterator[tuple[Rig, Client]]:
    """Serve as `gateway_rig` does, and yield a client that has connected as well."""
    async with gateway_rig(**fields) as rig:
        yield rig, await rig.client(receive_buffer)


# A client that can send anything -----------------------------------------------------------


@frozen
class Reply:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool  # it had its orderly end

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[str]:
        """The data of the server-sent events in it."""
        assert b"\r" not in self.body
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") and "\n" not in part for part in parts)
        return [part.removeprefix("data: ") for part in parts]

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def text(self) -> str:
        return "".join(
            choice["delta"].get("content", "") for chunk in self.chunks for choice in chunk.get("choices", ())
        )


def head(method: str = "GET", path: str = "/health", *, host: str = "127.0.0.1", **headers: object) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def handshake(path: str = "/v1/responses", **headers: str | None) -> bytes:
    """Return a WebSocket handshake; a header that is None is left out."""
    given: dict[str, Any] = {"upgrade": "websocket", "connection": "Upgrade", "sec_websocket_version": 13}
    given |= {"sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ=="} | headers
    return head("GET", path, **{name: value for name, value in given.items() if value is not None})


def post(body: object, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, content_length=len(data), **headers) + data


def chat(prompt: str = "n=5", **fields: Any) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}


def text(prompt: str | list[str] = "n=5", **fields: object) -> bytes:
    return post({"model": "tiny", "prompt": prompt, **fields}, "/v1/completions")


def response(prompt: str = "n=5", **fields: object) -> bytes:
    return post({"model": "tiny", "input": prompt, **fields}, "/v1/responses")


@define(eq=False)
class Client:
    """A client that sends raw bytes and parses HTTP responses."""

    stream: Any  # a SocketStream, or what a test has put around one
    buffer: bytes = b""
    answers_pings: bool = True  # as every library does while it reads
    _sending: trio.Lock = field(factory=trio.Lock)  # a pong may meet a message

    async def send(self, data: bytes) -> None:
        async with self._sending:
            await self.stream.send_all(data)

    async def ask(self, data: bytes) -> Reply:
        await self.send(data)
        return await self.reply(head_only=data.startswith(b"HEAD"))

    async def more(self) -> bool:
        try:
            data = await self.stream.receive_some(65536)
        except trio.BrokenResourceError:
            data = b""
        self.buffer += data
        return bool(data)

    async def until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            if not await self.more():
                raise EOFError(f"{mark!r} never came, but {self.buffer[:500]!r}")
        before, _, self.buffer = self.buffer.partition(mark)
        return before + mark

    async def exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            if not await self.more():
                break
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    async def reply(self, *, head_only: bool = False) -> Reply:
        start, *lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert len(headers) == len(lines), "a header stands twice"
        status = int(start.split()[1])
        if head_only or status in {100, 101}:
            return Reply(status, headers, b"", whole=True)
        if "content-length" in headers:
            size = int(headers["content-length"])
            body = await self.exactly(size)
            return Reply(status, headers, body, whole=len(body) == size)
        assert headers["transfer-encoding"] == "chunked"
        body = b""
        with suppress(EOFError):
            while size := int(await self.until(b"\r\n"), 16):
                body += (await self.exactly(size + 2))[:-2]
            await self.until(b"\r\n")
            return Reply(status, headers, body, whole=True)
        return Reply(status, headers, body, whole=False)

    async def closed(self) -> bool:
        """Read to the end of the connection, and return whether it was empty."""
        nothing = not self.buffer
        while await self.more():
            nothing = False
        return nothing

    async def upgrade(self, path: str = "/v1/responses", **headers: Any) -> Reply:
        return await self.ask(handshake(path, **headers))

    async def frame(self) -> tuple[int, bytes]:
        """Read one whole frame: its first byte and its payload; pings are answered instead."""
        while (received := await self._frame())[0] == 0x89 and self.answers_pings:
            await self.send(frame(received[1], 0x8A))
        return received

    async def _frame(self) -> tuple[int, bytes]:
        start = await self.exactly(2)
        if len(start) < 2:
            raise EOFError("no frame")
        size = start[1] & 127
        if size >= 126:
            size = int.from_bytes(await self.exactly(2 if size == 126 else 8), "big")
        payload = await self.exactly(size)
        if len(payload) < size:
            raise EOFError("half a frame")
        return start[0], payload

    async def event(self) -> dict[str, Any]:
        kind, payload = await self.frame()
        assert kind == 0x81, (kind, payload)
        event: dict[str, Any] = json.loads(payload)
        return event

    async def events(self, *last: str) -> list[dict[str, Any]]:
        """Read events up to one whose type is in `last`, or to the end of a response."""
        events = []
        while True:
            events.append(await self.event())
            if events[-1]["type"] in (last or FINAL_EVENTS):
                return events

    async def say(self, event: object, first: int = 0x81) -> None:
        await self.send(frame(event if isinstance(event, bytes) else json.dumps(event).encode(), first))

    async def close_frame(self) -> tuple[int, str]:
        """Read to the close frame, and return its code and its reason."""
        while True:
            kind, payload = await self.frame()
            if kind == 0x88:
                return int.from_bytes(payload[:2], "big"), payload[2:].decode()

    async def close_code(self) -> int:
        """Read to the close frame, and return its code."""
        return (await self.close_frame())[0]


def frame(payload: bytes, first: int = 0x81) -> bytes:
    """Return a client's WebSocket frame, masked with zeros."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 65_536:
        length = bytes([0x80 | 126]) + size.to_bytes(2, "big")
    else:
        length = bytes([0x80 | 127]) + size.to_bytes(8, "big")
    return bytes([first]) + length + bytes(4) + payload


def create(prompt: object = "n=5", **fields: Any) -> dict[str, object]:
    return {"type": "response.create", "model": "tiny", "input": prompt, **fields}


async def leave(client: Client, how: str) -> None:
    """End a connection by "close", by a "close frame", by closing the sending "half", or by a "reset"."""
    if how == "half":
        await client.stream.send_eof()
    elif how == "reset":
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.stream.socket.close()
    else:
        if how == "close frame":
            await client.send(frame(struct.pack(">H", 1000), 0x88))
        await client.stream.aclose()


async def at_rest(rig: Rig) -> None:
    """Wait until the gateway holds nothing for any client."""
    with trio.fail_after(10):
        await rig.gateway.connections.wait_closed()
        await rig.gateway.gate.wait_empty()
        while rig.worker.running:  # noqa: ASYNC110  # a fake has no event for it
            await trio.sleep(0.01)
    assert rig.worker.running == 0
    assert set(attrs.astuple(rig.gateway.statistics())) == {0}


async def leave_all(rig: Rig) -> None:
    """Close the connections of all clients, and wait until the gateway holds nothing for any of them."""
    rig.hang_up()
    await at_rest(rig)
