"""SGLang behind the embedder port: a host at the other end of a link."""

from __future__ import annotations

from typing import cast

import trio
from attrs import define, field

from actors.engines.embedding.embed_check import check_embed
from actors.engines.embedding.port import VectorsAnswer
from actors.engines.hosted_engine import HostLink, wait_silent
from actors.engines.sglang.boot_message import PARTS_WAITING_MAX
from protocol.errors import Overloaded
from protocol.messages.embedding import Embed
from protocol.messages.engine import EngineInfo, EngineLoad, GetLoad


@define(eq=False)
class SglangEmbedder:
    """One embedder of SGLang; implements `actors.engines.embedding.port.Embedder`."""

    link: HostLink
    info: EngineInfo
    _streams: dict[str, tuple[int, VectorsAnswer]] = field(factory=dict)

    def submit(self, request: Embed) -> VectorsAnswer:
        """Start a request; raises as the port does."""
        check_embed(request, self.info)
        if sum(not answer.over.is_set() for _, answer in self._streams.values()) >= self.limit:
            raise Overloaded(f"{self.limit} requests wait in the engine or are computed")
        stream, answer = self.link.open(request, 0)
        vectors = cast("VectorsAnswer", answer)  # the host answers an Embed with nothing else
        self._streams[request.id] = stream, vectors
        return vectors

    @property
    def limit(self) -> int:
        """The most requests in the engine, waiting ones included."""
        return self.info.running_max + PARTS_WAITING_MAX

    def abort(self, request_id: str) -> None:
        """Stop a request at any point of its life."""
        if (running := self._streams.get(request_id)) is not None:
            self.link.cancel(running[0])

    async def wait_released(self, request_id: str) -> None:
        """Wait until the host has closed the request's stream, as it does once the scheduler has released all items."""
        await trio.lowlevel.checkpoint()
        if (running := self._streams.get(request_id)) is not None:
            await running[1].over.wait()
            self._streams.pop(request_id, None)

    async def wait_lost(self) -> None:
        """Wait for the end of the link, which is the end of the engine."""
        await self.link.wait_lost()

    async def wait_silent(self, silent_s: float) -> None:
        """Wait until the scheduler has neither answered nor computed for `silent_s`; raises `EngineLost` at its end."""
        await wait_silent(self.link, silent_s)

    async def load(self) -> EngineLoad:
        """Return the scheduler's own count of items."""
        async with self.link.ask(GetLoad(), 0) as answer:
            load = await answer.result()
        assert isinstance(load, EngineLoad)
        return load
