"""The part that one rank of an engine has in hand-offs: by rooms if they are concurrent, by states if sequential."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, evolve, field

from actors.engines.simulated.held_request import HeldRequest
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import SimulatedSpec
from protocol.messages.cluster import Leg
from protocol.messages.generation import Started


@define(eq=False)
class Transfers:
    """The transfers of KV caches to or from one rank; an engine that computes both legs has none."""

    spec: SimulatedSpec
    rooms: RendezvousRooms
    states: HeldStates
    life: int = field(init=False)  # in the states of its prompts

    def __attrs_post_init__(self) -> None:
        self.life = self.states.begin_life()

    @property
    def _is_awaited(self) -> bool:
        """Whether prefills wait for it in rooms."""
        return self.spec.leg is Leg.DECODE and not self.spec.is_sequential

    @property
    def returns_states(self) -> bool:
        """Whether the answer to a prompt is a state."""
        return self.spec.leg is Leg.PREFILL and self.spec.is_sequential

    def submitted(self, held: HeldRequest) -> None:
        """Note that a decode is asked; raises `HandOffFailed` for a state that it cannot take."""
        if self._is_awaited:
            self.rooms.expect(held.room)
        elif self.spec.leg is Leg.DECODE:
            held.state = self.states.claim(held.request, self.spec.layout)

    def accepted(self, held: HeldRequest) -> None:
        """Note that a decode has a slot and memory for a prompt, or never will."""
        if self._is_awaited:
            self.rooms.accept(held.room)

    def waits(self, held: HeldRequest, notify: Callable[[], None]) -> bool:
        """Return whether a computed prompt must wait until a decode has accepted it; then `notify` is called."""
        return self.spec.leg is Leg.PREFILL and not self.spec.is_sequential and self.rooms.wait(held.room, notify)

    def hold(self, held: HeldRequest, version: str) -> Started:
        """Hold the state of a computed prompt, and return the reply that has it."""
        held.state = self.states.hold(self.life, held.request, self.spec.layout)
        return evolve(held.started(version), hand_off=held.state.encode())

    def can_arrive(self, held: HeldRequest) -> bool:
        """Whether a prompt that a decode has accepted is still held."""
        return self.spec.leg is not Leg.DECODE or self.states.holds(held.state)

    def release(self, held: HeldRequest) -> None:
        """Hold the state of a prompt no longer; idempotent."""
        if self.returns_states and held.state is not None:
            self.states.release(held.state)

    def close(self) -> None:
        """Release all states, as the engine has ended."""
        self.states.end_life(self.life)
