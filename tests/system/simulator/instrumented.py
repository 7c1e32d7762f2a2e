"""Parts of a gateway's node that record what happens, or have bugs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from attrs import define

from actors.kit.calls import Address, Answer
from actors.kit.direct import DirectAddress
from actors.kit.fair_queue import Entry
from protocol.messages.generation import Finished, Generate, Started, Tokens
from supervisor.gateway.admission import AdmissionGate, Waiter


@define(eq=False)
class FaultyDecode:
    """The decoding worker of the processor: the router, or a planted bug in front of it."""

    router: Address[Generate, Started | Tokens, Finished] | DirectAddress[Generate, Started | Tokens, Finished]
    bugs: int = 0  # that are still to come

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Answer[Started | Tokens, Finished]]:
        if self.bugs:
            self.bugs -= 1
            raise ZeroDivisionError("a planted bug")
        async with self.router.ask(request, credit) as answer:
            yield answer


@define(eq=False)
class RecordingGate(AdmissionGate):
    """An admission gate that records whether any request had to wait; if none had, it must refuse none."""

    was_full: bool = False

    async def _wait(self, waiter: Waiter, entry: Entry[Waiter]) -> None:
        self.was_full = True
        await super()._wait(waiter, entry)

    async def _enter(self, waiter: Waiter) -> None:
        await super()._enter(waiter)
        assert self.inside <= self.requests_max
