"""What every engine keeps, whatever computes inside it; `tests/contracts/engine.py` checks it."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from actors.kit.calls import Answer
from protocol.messages import EngineInfo, EngineLoad, Finished, Generate, Started, Tokens

Generation: TypeAlias = Answer[Started | Tokens, Finished]
"""The tokens of one request: one `Started`, then `Tokens`, one unit of credit a token, and `Finished`."""


class Engine(Protocol):
    """One engine, in whatever process it lives.

    A request's id is its asker's and known from the moment of `submit`; the engine holds one slot for it until
    `wait_released` returns. An answer that is over has released its slot already.
    """

    @property
    def info(self) -> EngineInfo:
        """What the engine is and what it can hold."""

    def submit(self, request: Generate) -> Generation:
        """Start a request; never blocks. Raises `Overloaded` without a free slot, `EngineLost` if the engine died."""

    def abort(self, request_id: str) -> None:
        """Stop a request: at once, at any moment from `submit` on, any number of times, also after its end."""

    async def wait_released(self, request_id: str) -> None:
        """Wait until the engine itself says that it holds nothing for the request any more."""

    async def wait_lost(self) -> None:
        """Wait until the engine can be asked no more, whatever the reason."""

    async def load(self) -> EngineLoad:
        """Return the engine's own count of what it runs and holds."""

    async def flush_cache(self) -> None:
        """Drop the prefix cache; raises `Overloaded` while requests run."""
