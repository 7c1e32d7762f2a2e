"""The engine port: what the actors know of an engine, whatever its kind.

An engine computes one request a slot, and a slot is freed by the engine alone: whoever asks may abort at any moment,
but must wait for `wait_released` before it counts the slot as free. So an engine that forgets an abort is found out by
its own slots, and never given more than it can hold. An engine may decide nothing about priorities, retries or
deadlines; those are the actors'.

`tests/contracts/engine.py` checks every kind, also what no type says. A `logit_bias` of 100 forces a token and one of
-100 forbids it; log probabilities stand beside each token, the likeliest first, and change no token; a `cache_salt`
keeps cached prompts apart; a stop token ends an answer and is delivered; and without `ignore_eos` some answers still
reach their limit. The last `said` tokens of a prompt are the beginning of the answer: the engine continues it, and
`tokens_max` counts only what is still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from actors.kit.calls import Answer
from protocol.messages.engine import EngineInfo, EngineLoad
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.kind import Message
from protocol.messages.kv_events import BlockEvents, EngineLoads

Generation: TypeAlias = Answer[Started | Tokens, Finished]
"""The tokens of one request: one `Started`, then `Tokens`, one unit of credit a token, and `Finished`."""


class Engine(Protocol):
    """One engine, in this process or another.

    A request's id is chosen by its asker and valid from `submit` on; the engine holds one slot for it until
    `wait_released` returns. An answer that is over has released its slot already.
    """

    @property
    def info(self) -> EngineInfo:
        """The engine's kind, version and limits."""

    def submit(self, request: Generate) -> Generation:
        """Start a request, or let it wait inside the engine for a slot; never blocks.

        Raises what `check_request` of `request_check.py` raises, `Overloaded` if neither a slot nor a place to wait is
        free, `TooLarge` if the request cannot be sent to the engine's process, and `EngineLost` if the engine died. At
        least one request may wait when all slots are taken.
        """

    def abort(self, request_id: str) -> None:
        """Stop a request: at once, at any moment from `submit` on, any number of times, also after its end."""

    async def wait_released(self, request_id: str) -> None:
        """Wait until the engine itself reports that it holds nothing for the request any more."""

    async def wait_lost(self) -> None:
        """Wait until the engine is lost, for any reason."""

    async def load(self) -> EngineLoad:
        """Return the engine's own count of its requests and of its KV tokens in use."""

    async def operate(self, request: Message) -> Message:
        """Carry out the request of a row of `OPERATIONS`, and return its result.

        Raises `Unsupported` unless the engine's info lists the operation, and `Overloaded` for one that an engine with
        requests cannot carry out, such as a flush of the prefix cache.
        """

    async def watch_blocks(self, receive: Callable[[BlockEvents], None]) -> None:
        """Pass on which blocks are in the prefix cache, and then each change; raises `EngineLost` at the end.

        The first events have `reset`, and so have those after a gap. An engine that tells nothing of its blocks passes
        on nothing.
        """

    async def watch_load(self, receive: Callable[[EngineLoads], None]) -> None:
        """Pass on the scheduler's load, and again when it has changed; raises `EngineLost` at the end."""
