"""A probe: a request of the canary to an idle engine, which leaves as every request does and yields to any.

It takes no slot from the semaphore of `Slots`, since the request loop of an actor always holds one in advance. Instead
it runs only while there is no request, and the first request cancels it. So no request waits for a slot because of it,
and the engine never has more requests than slots.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from actors.engines.port import Generation
from actors.engines.slots.slots import Slots
from protocol.errors import EngineStuck
from protocol.messages.generation import Generate


@asynccontextmanager
async def probing(slots: Slots, request: Generate) -> AsyncIterator[Generation]:
    """Submit a request to an engine that is idle; leaving, for any reason, aborts it and waits for its release.

    The body is cancelled, and the context left without an error, when a request comes, or by `Slots.cancel_probe`. A
    body that raises `EngineStuck` is left at once: what the engine holds ends with the engine. A slot that the engine
    keeps beyond `release_s` is stuck like a request's: raises `EngineStuck` once the engine is at fault.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    probe, waits = slots.begin_probe(), True
    try:
        generation = slots.engine.submit(request)
        try:
            with probe.scope:
                yield generation
        except EngineStuck:
            waits = False
            raise
        finally:
            slots.engine.abort(request.id)  # a no-op once it is over
            generation.abandon()
            if waits:
                with trio.move_on_after(slots.deadlines.release_s, shield=True) as waiting:
                    await slots.engine.wait_released(request.id)
                if waiting.cancelled_caught:
                    slots.stuck[request.id] = False
        if request.id in slots.stuck:
            await slots.wait_released(request.id)
    finally:
        slots.stuck.pop(request.id, None)
        slots.end_probe()
