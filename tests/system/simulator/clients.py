"""HTTP clients: most conform to the protocol, some do not."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import trio
from attrs import define, field

from protocol.messages.media import Detail
from tests.rig.gateway import Client, post
from tests.system.simulator import judge, tls
from tests.system.simulator.faults import Faults
from tests.system.simulator.model import PlannedRequest, draw, whole, with_other_pictures
from tests.system.simulator.pictures import LARGE, SHARED, Content, Picture
from tests.system.simulator.release_times import RELEASED_WITHIN_S
from tests.system.simulator.system import System

GONE = (EOFError, trio.BrokenResourceError, trio.ClosedResourceError)
STALLED_WITHIN_S = 15.0  # from half a request to the end of its connection: the limits of head, body and close
LONG_WORDS_MAX = 80
GIVEN_AHEAD_MAX = 5  # tokens until the abort after a stop string reaches the engine


@define(eq=False)
class Reader(Client):
    """A client that pauses before it reads for as long as the seed draws."""

    rng: random.Random | None = None
    pause_s: float = 0.0
    raw: trio.SocketStream = field(init=False)  # the socket below TLS, if there is any

    def __attrs_post_init__(self) -> None:
        self.raw = tls.below(self.stream)

    async def more(self) -> bool:
        if self.rng is not None and self.pause_s:
            await trio.sleep(self.rng.random() * self.pause_s)
        return await Client.more(self)

    async def read_answer(self, received: judge.Received) -> None:
        """Read one answer into `received`, which keeps the beginning if this is cancelled."""
        start, *lines = (await self.until(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        received.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        received.status = int(start.split()[1])
        if "content-length" in received.headers:
            received.body += await self.exactly(int(received.headers["content-length"]))
            received.whole = len(received.body) == int(received.headers["content-length"])
            return
        while size := int(await self.until(b"\r\n"), 16):
            received.body += (await self.exactly(size + 2))[:size]
        await self.until(b"\r\n")
        received.whole = True

    async def leave(self, how: str) -> None:
        """Close, reset, or half-close and stay a while."""
        with suppress(*GONE, OSError):
            if how == "reset":
                self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == "half":
                with trio.move_on_after(RELEASED_WITHIN_S):
                    if isinstance(self.stream, trio.SSLStream):
                        await self.stream.unwrap()
                    else:
                        await self.stream.send_eof()
                    while await Client.more(self):
                        pass
        self.hang_up()

    def hang_up(self) -> None:
        """Close the socket at once; idempotent."""
        self.raw.socket.close()


def chat(wanted: PlannedRequest) -> dict[str, object]:
    """Return the body of a chat completion."""
    body: dict[str, object] = {
        "model": "tiny",
        "messages": [{"role": role, "content": chat_content(content)} for role, content in wanted.turns],
        "max_completion_tokens": wanted.tokens_max,
        "stream": wanted.stream,
        "n": wanted.n,
    }
    if wanted.stream and wanted.usage:
        body["stream_options"] = {"include_usage": True}
    if wanted.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": wanted.logprobs}
    return body | options(wanted)


def chat_content(content: Content) -> object:
    """Return the content of a message as chat completions have it."""
    return content if isinstance(content, str) else [_chat_part(part) for part in content]


def _chat_part(part: str | Picture) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.frames:
        return {"type": "video_url", "video_url": {"url": part.url}}
    detail = {} if part.detail is Detail.AUTO else {"detail": part.detail.value}
    return {"type": "image_url", "image_url": {"url": part.url, **detail}}


def options(wanted: PlannedRequest) -> dict[str, object]:
    """Return the fields that are equal in every dialect."""
    fields = {"stop": list(wanted.stop), "stop_token_ids": list(wanted.stop_token_ids), "seed": wanted.seed}
    fields |= {"cache_salt": wanted.salt, "ttft_target_ms": wanted.ttft_ms}
    return {name: value for name, value in fields.items() if value not in ([], None)}


@define(eq=False)
class HttpClient:
    """A client that sends requests one after the other over one connection, and disconnects in one of several ways."""

    system: System
    rng: random.Random
    name: str
    faults: Faults
    note: Callable[..., None]
    slow: bool = False  # reads late or not at all

    def may(self, code: str) -> bool:
        """Whether any client may get this error code."""
        return self.faults.may(code)

    def allowed(self, code: str) -> bool:
        """Whether this client may get this error code."""
        return self.may(code) or (self.slow and code in {"slow_client", "unanswered", "cut"})

    async def live(self) -> None:
        rng = self.rng
        await trio.sleep(rng.random() * 3)
        try:
            reader = Reader(self.system.connect(), rng=rng)
        except trio.BrokenResourceError:
            assert self.may("unanswered")
            return
        try:
            if rng.random() < 0.1:
                await rng.choice((self._garble, self._invalid, self._stall))(reader)
            else:
                await self._converse(reader)
        finally:
            reader.hang_up()

    async def _converse(self, reader: Reader) -> None:
        rng = self.rng
        reader.pause_s = rng.choice((0, 0, 0, 0.3))
        asked = [self._draw(f"{self.name}.{number}") for number in range(rng.choice((1, 1, 2, 3)))]
        if self.system.album is not None and rng.random() < 0.5:
            asked += [with_other_pictures(wanted) for wanted in asked if wanted.pictures and not wanted.refused]
        self.system.refused |= {tuple(wanted.prompt) for wanted in asked if wanted.refused}
        ahead = len(asked) > 1 and rng.random() < 0.3
        self.slow = ahead or reader.pause_s > 0
        patience_s = rng.choice((rng.expovariate(1), rng.expovariate(4), 1e4, 1e4, 1e4))
        left = trio.CancelScope(deadline=trio.current_time() + patience_s)
        with suppress(*GONE):
            for wanted in asked if ahead else ():
                await reader.send(self.post(wanted))
                await trio.sleep(rng.choice((0, 0.05)))
        for wanted in asked:
            received, asked_at = judge.Received(), self._age()
            with left, suppress(*GONE):
                if not ahead:
                    await reader.send(self.post(wanted, x_request_id=self.name))
                await reader.read_answer(received)
            outcome = self.judged(wanted, received, stayed=not left.cancelled_caught)
            self.note(wanted.name, *["picture"] * bool(wanted.pictures), outcome)
            if received.status and not ahead:
                assert received.headers["x-request-id"] == self.name
            if not self.slow:
                assert self._age() - asked_at <= self.system.answered_within_s, "it took too long"
            if left.cancelled_caught or not received.whole or received.headers.get("connection") == "close":
                break
            await trio.sleep(rng.choice((0, rng.random())))
            left = trio.CancelScope(deadline=left.deadline)
        if left.cancelled_caught:
            await reader.leave(rng.choice(("close", "reset", "half")))
        await self._check_gone(asked)

    def _age(self) -> float:
        """Return the time, without the jumps of the clock."""
        return trio.current_time() - self.faults.releases.jumped_s

    def _draw(self, name: str) -> PlannedRequest:
        return draw(self.rng, name, choices_max=3, album=self.system.album, guides=self.system.guides)

    def post(self, wanted: PlannedRequest, **headers: str) -> bytes:
        return post(chat(wanted), **headers)

    def judged(self, wanted: PlannedRequest, received: judge.Received, *, stayed: bool) -> str:
        return judge.http(wanted, received, self.allowed, stayed=stayed)

    async def _check_gone(self, asked: list[PlannedRequest]) -> None:
        """Wait until the slots of this client must be free, and check that they are."""
        releases, system = self.faults.releases, self.system
        self.note(self.name, "gone", *await releases.wait_due(system.cancel_delay_s))
        own = {picture.name for wanted in asked for picture in wanted.pictures} - {LARGE, *SHARED}
        assert not any(system.gallery.held[name] for name in own), "a picture is held without a client"
        system.gallery.gone |= own
        for wanted in asked:
            assert not system.holding(wanted.prompt), "a slot is held without a client"
            if system.network["delay_s"] < 0.01 and not releases.swallowed:
                for number, choice in enumerate(whole(wanted).choices):
                    seed = None if wanted.seed is None else wanted.seed ^ number
                    tokens = system.given(wanted.seen, seed)
                    assert tokens <= len(choice.ids) + GIVEN_AHEAD_MAX, (
                        "tokens were computed after the answer had ended"
                    )

    # Clients that make mistakes --------------------------------------------------------------

    async def _invalid(self, reader: Reader) -> None:
        body = chat(draw(self.rng, self.name))
        wrong, status, code = self.rng.choice(
            (
                ({"max_completion_tokens": 0}, 400, "invalid_request"),
                ({"temperature": "hot"}, 400, "invalid_request"),
                ({"no_such_field": 1}, 400, "invalid_request"),
                ({"model": "huge"}, 404, "model_not_found"),
                ({"max_completion_tokens": 100_000}, 400, "context_length_exceeded"),
            )
        )
        received = judge.Received()
        with suppress(*GONE):
            await reader.send(post(body | wrong))
            await reader.read_answer(received)
        if received.status == 0:
            assert self.may("unanswered")
            return
        error = json.loads(received.body)["error"]
        if (received.status, error["code"]) != (status, code):
            judge.error(error, self.may, received)
        self.note(self.name, "refused", error["code"])

    async def _garble(self, reader: Reader) -> None:
        data = bytearray(post(chat(draw(self.rng, self.name))))
        for _ in range(self.rng.randint(1, 5)):
            data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        with suppress(*GONE), trio.move_on_after(self.rng.random() * 8):
            stream = self._below(reader)
            await stream.send_all(bytes(data))
            await self._read_to_end(reader, stream)
        self.note(self.name, "garbled", bytes(reader.buffer[:12]))

    async def _stall(self, reader: Reader) -> None:
        data, stream = post(chat(draw(self.rng, self.name))), self._below(reader)
        if stream is not reader.stream:
            data = tls.hello()
        patience_s, size = self.rng.choice((1.0, 20.0)), self.rng.randrange(len(data))
        with suppress(*GONE), trio.move_on_after(patience_s) as patience:
            await stream.send_all(data[:size])
            await self._read_to_end(reader, stream)
        in_time = patience_s < STALLED_WITHIN_S or size == 0 or self.faults.releases.jumped_s
        assert in_time or not patience.cancelled_caught, "half a request kept its connection"
        self.note(self.name, "stalled", bytes(reader.buffer[:12]))

    def _below(self, reader: Reader) -> trio.abc.Stream:
        """Return the stream for malformed bytes: with TLS, sometimes the socket below it."""
        return reader.raw if self.system.tls and self.rng.random() < 0.5 else reader.stream

    async def _read_to_end(self, reader: Reader, stream: trio.abc.Stream) -> None:
        """Read to the end; bytes below TLS are not kept, since they are random."""
        while await (reader.more() if stream is reader.stream else stream.receive_some(65536)):
            pass


@define(eq=False)
class LongClient(HttpClient):
    """A client whose prompts are long, so that they push others out of prefix caches."""

    def _draw(self, name: str) -> PlannedRequest:
        return draw(self.rng, name, guides=self.system.guides, words_max=LONG_WORDS_MAX)


@define(eq=False)
class DeafClient(HttpClient):
    """A client that sends many requests and never reads: it is dropped, and its slots are released."""

    async def live(self) -> None:
        rng = self.rng
        await trio.sleep(rng.random() * 3)
        with suppress(trio.BrokenResourceError):
            reader = Reader(self.system.connect())
            asked = [draw(rng, f"{self.name}.{number}") for number in range(8)]
            with suppress(*GONE):
                await reader.send(b"".join(post(chat(wanted)) for wanted in asked))
            for _ in range(rng.choice((2, 60))):
                await trio.sleep(0.5)
                self.system.check_backlogs()
            reader.hang_up()
            await self._check_gone(asked)
        self.note(self.name, "deaf")
