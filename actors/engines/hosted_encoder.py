"""An encoder behind the port: a host of any kind at the other end of a link."""

from __future__ import annotations

from typing import cast

import trio
from attrs import define, field

from actors.engines.encoding.port import BatchAnswer
from actors.engines.hosted_engine import HostLink, wait_silent
from protocol.errors import BadRequest, Overloaded
from protocol.messages.engine import EngineInfo, EngineLoad, GetLoad
from protocol.messages.media import BATCHES_MAX, EncodeBatch


@define(eq=False)
class HostedEncoder:
    """One encoder in a process of its own; implements `actors.engines.encoding.port.Encoder`."""

    link: HostLink
    info: EngineInfo
    _streams: dict[str, tuple[int, BatchAnswer]] = field(factory=dict)

    def submit(self, batch: EncodeBatch) -> BatchAnswer:
        """Start a batch; raises as the port does."""
        if not 1 <= len(batch.items) <= self.info.running_max:
            raise BadRequest(f"a batch has 1 to {self.info.running_max} items, and this one {len(batch.items)}")
        if sum(not answer.over.is_set() for _, answer in self._streams.values()) >= BATCHES_MAX:
            raise Overloaded(f"{BATCHES_MAX} batches wait in the encoder or are computed")
        stream, answer = self.link.open(batch, 0)
        batch_answer = cast("BatchAnswer", answer)  # the host answers a batch with nothing else
        self._streams[batch.id] = stream, batch_answer
        return batch_answer

    def abort(self, batch_id: str) -> None:
        """Stop a batch at any point of its life."""
        if (running := self._streams.get(batch_id)) is not None:
            self.link.cancel(running[0])

    async def wait_released(self, batch_id: str) -> None:
        """Wait until the host has closed the batch's stream, as it does once nothing is computed for it."""
        await trio.lowlevel.checkpoint()
        if (running := self._streams.get(batch_id)) is not None:
            await running[1].over.wait()
            self._streams.pop(batch_id, None)

    async def wait_lost(self) -> None:
        """Wait for the end of the link, which is the end of the encoder."""
        await self.link.wait_lost()

    async def wait_silent(self, silent_s: float) -> None:
        """Wait until the thread that computes has neither answered nor computed for `silent_s`.

        Raises `EngineLost` at the end of the host. The actor limits the duration of a batch.
        """
        await wait_silent(self.link, silent_s)

    async def load(self) -> EngineLoad:
        """Return the host's own count of its items."""
        async with self.link.ask(GetLoad(), 0) as answer:
            load = await answer.result()
        assert isinstance(load, EngineLoad)
        return load
