"""Lives of engines in which operations are carried out, as `supervisor.engines.actor_runs` runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from actors.engines.port import Engine
from actors.engines.slots.slots import Slots
from protocol.engine_state import EngineState
from protocol.errors import EngineRenewed
from protocol.messages.kind import Message
from protocol.weights_record import WeightsRecord
from supervisor.cluster.engine_life import EngineLife
from supervisor.cluster.model_weights import NewestWeights
from supervisor.supervision.registration import Registration


class OwnWeights(NewestWeights):
    """The newest weights where each engine may have its own: no part of these systems brings others to them."""

    def behind(self, _: WeightsRecord) -> str:
        """Return that an engine is asked with any weights."""
        return ""


@asynccontextmanager
async def carrying_out(
    engine: Engine, registration: Registration[Engine], slots: Slots, life: Registration[EngineLife]
) -> AsyncIterator[None]:
    """Publish a life of an engine while the body runs."""
    async with trio.open_nursery() as nursery:
        present = EngineLife(engine, registration, (slots,), nursery, _renewed, OwnWeights())
        with life.publish(present), present:
            yield
        nursery.cancel_scope.cancel(reason="the engine's actor has ended")


def _renewed(_: Message) -> EngineRenewed:
    return EngineRenewed("it is renewed")


def check_in_service(registration: Registration[Engine], life: Registration[EngineLife]) -> None:
    """Check that no operation is left in a life, and that nothing keeps its engine out of service."""
    assert life.current is not None, "an engine is down"
    assert life.current.state == EngineState(), f"an engine is left {life.current.state.service}"
    assert registration.in_service, f"an engine {registration.status_text}"
    for slots in life.current.slots:
        assert not slots.occupied, "a request has a slot"
        assert slots._rests_since is None, "an engine's requests rest"  # noqa: SLF001  # no product code asks for it
