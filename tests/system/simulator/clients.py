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

from tests.rig.gateway import Client, post
from tests.system.simulator import judge, tls
from tests.system.simulator.faults import Faults
from tests.system.simulator.model import Wanted, draw, whole
from tests.system.simulator.release_times import RELEASED_WITHIN_S
from tests.system.simulator.system import System

GONE = (EOFError, trio.BrokenResourceError, trio.ClosedResourceError)
STALLED_WITHIN_S = 15.0  # from half a request to the end of its connection: a head's time, a body's, the farewell's
GIVEN_AHEAD_MAX = 5  # tokens, until an engine hears that a stop string has come


@define(eq=False)
class Reader(Client):
    """A client that pauses before it reads for as long as the seed draws."""

    rng: random.Random | None = None
    pause_s: float = 0.0
    raw: trio.SocketStream = field(init=False)  # what TLS, if there is any, stands on

    def __attrs_post_init__(self) -> None:
        self.raw = tls.below(self.stream)

    async def more(self) -> bool:
        if self.rng is not None and self.pause_s:
            await trio.sleep(self.rng.random() * self.pause_s)
        return await Client.more(self)

    async def hear(self, heard: judge.Heard) -> None:
        """Read one answer into `heard`, so that what has come is there even if this is cancelled."""
        start, *lines = (await self.until(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        heard.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        heard.status = int(start.split()[1])
        if "content-length" in heard.headers:
            heard.body += await self.exactly(int(heard.headers["content-length"]))
            heard.whole = len(heard.body) == int(heard.headers["content-length"])
            return
        while size := int(await self.until(b"\r\n"), 16):
            heard.body += (await self.exactly(size + 2))[:size]
        await self.until(b"\r\n")
        heard.whole = True

    async def leave(self, how: str) -> None:
        """Close, or reset, or say only that nothing follows and stay a while."""
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


def chat(wanted: Wanted) -> dict[str, object]:
    """Return the body of a chat completion."""
    body: dict[str, object] = {
        "model": "tiny",
        "messages": [{"role": role, "content": text} for role, text in wanted.turns],
        "max_completion_tokens": wanted.tokens_max,
        "stream": wanted.stream,
        "n": wanted.n,
    }
    if wanted.stream and wanted.usage:
        body["stream_options"] = {"include_usage": True}
    if wanted.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": wanted.logprobs}
    return body | options(wanted)


def options(wanted: Wanted) -> dict[str, object]:
    """Return the fields that every dialect spells alike."""
    given = {"stop": list(wanted.stop), "stop_token_ids": list(wanted.stop_token_ids), "seed": wanted.seed}
    return {name: value for name, value in given.items() if value not in ([], None)}


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
        """Whether this error code is true for any client."""
        return self.faults.may(code)

    def true(self, code: str) -> bool:
        """Whether this error code is true for this client."""
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
        self.system.refused |= {tuple(wanted.prompt) for wanted in asked if wanted.refused}
        ahead = len(asked) > 1 and rng.random() < 0.3
        self.slow = ahead or reader.pause_s > 0
        patience_s = rng.choice((rng.expovariate(1), rng.expovariate(4), 1e4, 1e4, 1e4))
        left = trio.CancelScope(deadline=trio.current_time() + patience_s)
        with suppress(*GONE):
            for wanted in asked if ahead else ():
                await reader.send(self._post(wanted))
                await trio.sleep(rng.choice((0, 0.05)))
        for wanted in asked:
            heard, asked_at = judge.Heard(), self._age()
            with left, suppress(*GONE):
                if not ahead:
                    await reader.send(self._post(wanted, x_request_id=self.name))
                await reader.hear(heard)
            outcome = self._judge(wanted, heard, stayed=not left.cancelled_caught)
            self.note(wanted.turns[-1][1].split()[0], outcome)
            if heard.status and not ahead:
                assert heard.headers["x-request-id"] == self.name
            if not self.slow:
                assert self._age() - asked_at <= self.system.answered_within_s, "it took too long"
            if left.cancelled_caught or not heard.whole or heard.headers.get("connection") == "close":
                break
            await trio.sleep(rng.choice((0, rng.random())))
            left = trio.CancelScope(deadline=left.deadline)
        if left.cancelled_caught:
            await reader.leave(rng.choice(("close", "reset", "half")))
        await self._check_gone(asked)

    def _age(self) -> float:
        """Return the time, without the jumps of the clock."""
        return trio.current_time() - self.faults.freeing.jumped_s

    def _draw(self, name: str) -> Wanted:
        return draw(self.rng, name, choices_max=3)

    def _post(self, wanted: Wanted, **headers: str) -> bytes:
        return post(chat(wanted), **headers)

    def _judge(self, wanted: Wanted, heard: judge.Heard, *, stayed: bool) -> str:
        return judge.http(wanted, heard, self.true, stayed=stayed)

    async def _check_gone(self, asked: list[Wanted]) -> None:
        """Wait for as long as slots may be held for one who has left, or has been answered; then none may be."""
        freeing, system = self.faults.freeing, self.system
        self.note(self.name, "gone", *await freeing.wait_due(system.way_s))
        for wanted in asked:
            assert not system.holding(wanted.prompt), "a slot is held for nobody"
            if system.network["delay_s"] < 0.01 and not freeing.swallowed:
                for number, choice in enumerate(whole(wanted).choices):
                    seed = None if wanted.seed is None else wanted.seed ^ number
                    given = system.given(wanted.prompt, seed)
                    assert given <= len(choice.ids) + GIVEN_AHEAD_MAX, "tokens were computed for nobody"

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
        heard = judge.Heard()
        with suppress(*GONE):
            await reader.send(post(body | wrong))
            await reader.hear(heard)
        if heard.status == 0:
            assert self.may("unanswered")
            return
        said = json.loads(heard.body)["error"]
        if (heard.status, said["code"]) != (status, code):
            judge.error(said, self.may, heard)
        self.note(self.name, "refused", said["code"])

    async def _garble(self, reader: Reader) -> None:
        data = bytearray(post(chat(draw(self.rng, self.name))))
        for _ in range(self.rng.randint(1, 5)):
            data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        with suppress(*GONE), trio.move_on_after(self.rng.random() * 8):
            stream = self._below(reader)
            await stream.send_all(bytes(data))
            await self._hear_out(reader, stream)
        self.note(self.name, "garbled", bytes(reader.buffer[:12]))

    async def _stall(self, reader: Reader) -> None:
        data, stream = post(chat(draw(self.rng, self.name))), self._below(reader)
        if stream is not reader.stream:
            data = tls.hello()
        patience_s, size = self.rng.choice((1.0, 20.0)), self.rng.randrange(len(data))
        with suppress(*GONE), trio.move_on_after(patience_s) as patience:
            await stream.send_all(data[:size])
            await self._hear_out(reader, stream)
        in_time = patience_s < STALLED_WITHIN_S or size == 0 or self.faults.freeing.jumped_s
        assert in_time or not patience.cancelled_caught, "half a request keeps its connection"
        self.note(self.name, "stalled", bytes(reader.buffer[:12]))

    def _below(self, reader: Reader) -> trio.abc.Stream:
        """Return what to write mistakes to: if there is TLS, that is sometimes the socket below it."""
        return reader.raw if self.system.tls and self.rng.random() < 0.5 else reader.stream

    async def _hear_out(self, reader: Reader, stream: trio.abc.Stream) -> None:
        """Read to the end; what comes below TLS is not kept, since chance has a part in it."""
        while await (reader.more() if stream is reader.stream else stream.receive_some(65536)):
            pass


@define(eq=False)
class DeafClient(HttpClient):
    """A client that asks for much and never reads: it is dropped, and what was computed for it is released."""

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
