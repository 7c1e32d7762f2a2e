"""An engine in a process of its own behind the engine port: harmful requests are not sent to its host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

import trio
from attrs import define, field

from actors.engines.port import Generation
from actors.engines.request_check import check_operation, check_request
from actors.kit.calls import Answer, Askable
from protocol.errors import EngineLost, RequestError
from protocol.messages.adapters import AdapterList
from protocol.messages.engine import Alive, EngineInfo, EngineLoad, GetInfo, GetLoad, Ping, WatchLoad
from protocol.messages.generation import Generate
from protocol.messages.kind import Message
from protocol.messages.kv_events import BlockEvents, WatchBlocks

PROBES = 4  # the number of probes in the time that an engine may be silent
WATCH_CREDIT = 8192  # replies: all blocks of the largest cache, after which a stream is asked for again
INFO_WITHIN_S = 5.0  # to read an engine's info again after an operation
CONTROLS_MAX = 4  # control operations at a time: the host keeps some streams for them beside those for requests


class HostLink(Askable[Message, Message, Message], Protocol):
    """The link to a host, as far as the adapter uses it."""

    def open(self, request: Message, credit: int) -> tuple[int, Answer[Message, Message]]:
        """Open a stream without waiting: its number and its answer."""

    def cancel(self, stream: int) -> None:
        """Cancel a request; idempotent."""

    async def wait_lost(self) -> None:
        """Wait until the link is lost."""


@define(eq=False)
class HostedEngine:
    """One engine at the other end of a link; implements `actors.engines.port.Engine`."""

    link: HostLink
    info: EngineInfo
    adapters: AdapterList | None = None  # its adapters after the last operation that changed them
    streams: dict[str, tuple[int, Generation]] = field(factory=dict)
    _controls: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(CONTROLS_MAX))

    @property
    def unreleased(self) -> int:
        """The number of requests that have not been released."""
        return len(self.streams)

    def check_hand_off(self, request: Generate) -> None:
        """Raise `HandOffFailed` for a hand-off that the engine would wait for in vain."""
        del request

    def submit(self, request: Generate) -> Generation:
        """Start a request; raises `BadRequest` for one that would crash the engine or be changed by it."""
        check_request(request, self.info)
        self.check_hand_off(request)
        stream, answer = self.link.open(request, request.sampling.tokens_max)
        generation = cast("Generation", answer)  # the host answers a Generate with nothing else
        self.streams[request.id] = stream, generation
        return generation

    def abort(self, request_id: str) -> None:
        """Stop a request at any point of its life."""
        if (running := self.streams.get(request_id)) is not None:
            self.link.cancel(running[0])

    async def wait_released(self, request_id: str) -> None:
        """Wait until the host has closed the request's stream, as it does once the scheduler has released the slot."""
        await trio.lowlevel.checkpoint()
        if (running := self.streams.get(request_id)) is not None:
            await running[1].over.wait()
            self.streams.pop(request_id, None)

    async def wait_lost(self) -> None:
        """Wait for the end of the link, which is the end of the engine."""
        await self.link.wait_lost()

    async def wait_silent(self, silent_s: float) -> None:
        """Wait until no scheduler of the engine has answered for `silent_s`; raises `EngineLost` at its end.

        An engine that runs requests and computes counts as answering, however long its step takes.
        """
        await wait_silent(self.link, silent_s)

    async def load(self) -> EngineLoad:
        """Return the scheduler's own count."""
        load = await self._control(GetLoad())
        assert isinstance(load, EngineLoad)
        return load

    async def held_up(self) -> bool:
        """Whether the scheduler waits for a compiler or a disk; returns once it gives any sign of life."""
        alive = await self._control(Ping())
        return isinstance(alive, Alive) and alive.held_up

    async def operate(self, request: Message) -> Message:
        """Have the host carry out an operation; raises `Unsupported` for an unlisted one.

        A host cannot stop an operation: it continues after its asker has left.
        """
        await trio.lowlevel.checkpoint()
        operation, refused, result = check_operation(request, self.info), None, None
        try:
            result = await self._control(request)
        except RequestError as error:
            refused = error
        if isinstance(result, AdapterList):
            self.adapters = result
        if operation.changes_info:
            await self._read_info()
        if refused is not None:
            raise refused
        assert result is not None  # an operation has a result
        return result

    async def _read_info(self) -> None:
        """Read the engine's info again, unless it has ended."""
        await trio.lowlevel.checkpoint()
        with suppress(EngineLost, trio.TooSlowError), trio.fail_after(INFO_WITHIN_S):
            info = await self._control(GetInfo())
            assert isinstance(info, EngineInfo)  # nothing else answers a GetInfo
            self.info = info

    async def watch_blocks(self, receive: Callable[[BlockEvents], None]) -> None:
        """Pass on the scheduler's reports of its prefix cache; raises `EngineLost` at the end of the link."""
        life, since = "", 0
        while True:
            async with self.link.ask(WatchBlocks(life, since), WATCH_CREDIT) as answer:
                async for events in answer:
                    assert isinstance(events, BlockEvents)  # nothing else answers a WatchBlocks
                    life, since = events.life, events.number
                    receive(events)

    async def watch_load(self, receive: Callable[[EngineLoad], None]) -> None:
        """Pass on the scheduler's load when it has changed; raises `EngineLost` at the end of the link."""
        while True:
            async with self.link.ask(WatchLoad(), WATCH_CREDIT) as answer:
                async for loads in answer:
                    assert isinstance(loads, EngineLoad)  # nothing else answers a WatchLoad
                    receive(loads)

    async def _control(self, request: Message) -> Message | None:
        async with self._controls, self.link.ask(request, 0) as answer:
            return await answer.result()


async def wait_silent(link: HostLink, silent_s: float) -> None:
    """Wait until a host has left a `Ping` unanswered for `silent_s`; raises `EngineLost` at the end of the link."""
    probe_s = silent_s / PROBES
    while True:
        async with link.ask(Ping(), 0) as answer:
            # In several short waits: a time in which this process itself was stopped counts as one of them.
            for _ in range(PROBES - 1):
                with trio.move_on_after(probe_s):
                    await answer.over.wait()
                    break
            if not answer.over.is_set():
                return
            await answer.result()
        await trio.sleep(probe_s)
