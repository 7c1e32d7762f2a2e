"""SGLang behind the engine port: a host at the other end of a link, and the requests that would kill it refused."""

from __future__ import annotations

from typing import Protocol, cast

import trio
from attrs import define, field

from actors.engines.port import Generation
from actors.engines.request_check import check
from actors.kit.calls import Answer, Askable
from protocol.kind import Message
from protocol.messages import EngineInfo, EngineLoad, FlushCache, Generate, GetLoad, Ping

LOOKS = 4  # in the time that an engine may be silent
CONTROLS_MAX = 4  # asked at a time: the host keeps some streams for them, and the others are for requests


class HostLink(Askable[Message, Message, Message], Protocol):
    """What this needs of the link to its host."""

    def open(self, request: Message, credit: int) -> tuple[int, Answer[Message, Message]]:
        """Ask without waiting: the stream's number and its answer."""

    def cancel(self, stream: int) -> None:
        """Cancel a request; idempotent."""

    async def wait_lost(self) -> None:
        """Wait until the link is lost."""


@define(eq=False)
class SglangEngine:
    """One SGLang engine; keeps the promises of `actors.engines.port.Engine`."""

    link: HostLink
    info: EngineInfo
    _streams: dict[str, tuple[int, Generation]] = field(factory=dict)
    _controls: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(CONTROLS_MAX))

    def submit(self, request: Generate) -> Generation:
        """Start a request; raises `BadRequest` for one that would crash the engine, or be changed by it."""
        check(request, self.info)
        stream, answer = self.link.open(request, request.sampling.tokens_max)
        generation = cast("Generation", answer)  # the host answers a Generate with nothing else
        self._streams[request.id] = stream, generation
        return generation

    def abort(self, request_id: str) -> None:
        """Stop a request, whatever point it has reached."""
        if (running := self._streams.get(request_id)) is not None:
            self.link.cancel(running[0])

    async def wait_released(self, request_id: str) -> None:
        """Wait until the host has closed the request's stream, which it does when the scheduler has let go."""
        await trio.lowlevel.checkpoint()
        if (running := self._streams.get(request_id)) is not None:
            await running[1].over.wait()
            self._streams.pop(request_id, None)

    async def wait_lost(self) -> None:
        """Wait for the end of the link, which is the end of the engine."""
        await self.link.wait_lost()

    async def wait_silent(self, silent_s: float) -> None:
        """Wait until nothing that computes in the engine has answered for `silent_s`; raises `EngineLost` at its end.

        An engine that runs requests and computes counts as answering, however long its step takes.
        """
        look_s = silent_s / LOOKS
        while True:
            async with self.link.ask(Ping(), 0) as answer:
                # In several short waits: if this process stood still itself, that was one of them.
                for _ in range(LOOKS - 1):
                    with trio.move_on_after(look_s):
                        await answer.over.wait()
                        break
                if not answer.over.is_set():
                    return
                await answer.result()
            await trio.sleep(look_s)

    async def load(self) -> EngineLoad:
        """Return the scheduler's own count."""
        load = await self._control(GetLoad())
        assert isinstance(load, EngineLoad)
        return load

    async def flush_cache(self) -> None:
        """Drop the prefix cache; raises `Overloaded` while requests run."""
        await self._control(FlushCache())

    async def _control(self, request: Message) -> Message | None:
        async with self._controls, self.link.ask(request, 0) as answer:
            return await answer.result()
