"""The states of prompts that the sequential prefills of one process hold, each for one decode."""

from __future__ import annotations

from itertools import count

from attrs import define, field

from actors.engines.simulated.hand_off import ALONE, State
from protocol.errors import HandOffFailed
from protocol.messages.generation import Generate


@define(eq=False)
class HeldStates:
    """The states that can be taken in this process, each with the name of the process.

    A state is held from the end of its prompt until its request is aborted or its engine ends. A state of another
    process cannot be looked up here, so that it counts as held.
    """

    process: str = ""
    _lives: count[int] = field(factory=lambda: count(1))
    _numbers: count[int] = field(factory=lambda: count(1))
    _alive: set[int] = field(factory=set)
    _held: dict[State, bool] = field(factory=dict)  # True once a decode has claimed it

    def __len__(self) -> int:
        return len(self._held)

    def begin_life(self) -> int:
        """Return the number of a life of an engine, or of one of its ranks."""
        life = next(self._lives)
        self._alive.add(life)
        return life

    def end_life(self, life: int) -> None:
        """Release every state of a life."""
        self._alive.discard(life)
        self._held = {state: claimed for state, claimed in self._held.items() if state.life != life}

    def hold(self, life: int, request: Generate, layout: bytes) -> State:
        """Hold the state of a prompt that is computed."""
        state = State.of(request, layout, life=life, number=next(self._numbers), process=self.process)
        self._held[state] = False
        return state

    def release(self, state: State) -> None:
        """Hold a state no longer; idempotent."""
        self._held.pop(state, None)

    def claim(self, request: Generate, layout: bytes) -> State | None:
        """Return the state of a decode's request, which no other may take then; None for one without a partner.

        Raises `HandOffFailed` for a state that cannot be read, of another prompt or an engine with other KV caches,
        already claimed, or held no longer.
        """
        if request.hand_off == ALONE:
            return None
        state = State.decode(request.hand_off)
        own = State.of(request, layout, life=state.life, number=state.number, process=state.process)
        if state.layout != own.layout:
            raise HandOffFailed("the state is of another engine, whose KV caches are different")
        if state.prompt != own.prompt:
            raise HandOffFailed("the state is of another prompt")
        if state.process != self.process:
            return state
        if state.life not in self._alive:
            raise HandOffFailed("the state is of another life of its engine, which has ended")
        if (claimed := self._held.get(state)) is None:
            raise HandOffFailed("the state is held no longer: its prefill was left")
        if claimed:
            raise HandOffFailed("the state has been used by another decode")
        self._held[state] = True
        return state

    def holds(self, state: State | None) -> bool:
        """Whether the KV cache of a claimed state can still be transferred."""
        return state is None or state.process != self.process or state in self._held
