"""The engine port: an engine of any kind, as the actors see it.

An engine computes one request a slot, and a slot is freed by the engine alone: the asker may abort at any moment, but
must wait for `wait_released` before it counts the slot as free. So an engine that ignores an abort loses a slot, and is
never given more than it can hold. An engine decides nothing about retries or deadlines; these are the actors'.

An engine of whole requests may be given requests for more KV memory than it has. There the higher `priority` goes first
when one is given memory, and running requests of a lower one are put back for it: they go on later, from where they
were. Requests of one priority keep their order.

`tests/contracts/engine.py` checks every kind, beyond the types. A `logit_bias` of 100 forces a token and one of -100
forbids it; log probabilities stand beside each token, the likeliest first, and change no token; a `cache_salt` keeps
cached prompts apart; a stop token ends an answer and is delivered; and without `ignore_eos` some answers still reach
their limit. The last `resumed_tokens` of a prompt are the beginning of the answer: the engine continues it, and
`tokens_max` counts the rest alone.

`tests/contracts/pair.py` checks a prefill and a decode of one kind together. A sequential prefill answers with one
`Started`, which has a state, and holds the KV cache until `abort`. A sequential decode answers all tokens, the first
too. `submit` refuses a state of another engine, life or prompt, or one already used, with `HandOffFailed`; a decode's
answer fails with it if the prefill is left before the decode's `Started`. The wording of a refusal is the kind's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from actors.kit.calls import Answer
from protocol.messages.engine import EngineInfo, EngineLoad
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.kind import Message
from protocol.messages.kv_events import BlockEvents

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

        Raises the errors of `check_request` (`request_check.py`), `Overloaded` if neither a slot nor a place to wait is
        free, `TooLarge` if the request cannot be sent to the engine's process, and `EngineLost` if the engine died. At
        least one request may wait when all slots are taken. A prompt with a token id outside the vocabulary is a
        `BadRequest` here or at the end of the answer.
        """

    def abort(self, request_id: str) -> None:
        """Stop a request: at once, at any moment from `submit` on, any number of times, also after its end."""

    async def wait_released(self, request_id: str) -> None:
        """Wait until the engine itself reports the request's release."""

    async def wait_lost(self) -> None:
        """Wait until the engine is lost, for any reason."""

    async def load(self) -> EngineLoad:
        """Return the engine's own count of its requests and of its KV tokens in use."""

    async def held_up(self) -> bool:
        """Whether it waits for a compiler or a disk, and so neither answers nor releases anything for now.

        Returns within seconds from an engine that lives; never from any other one. Its kind limits that wait.
        """

    async def operate(self, request: Message) -> Message:
        """Carry out the request of a row of `OPERATIONS`, and return its result.

        Raises `Unsupported` unless the engine's info lists the operation, and `Overloaded` if running requests forbid
        it, as they do a flush of the prefix cache. If it is cancelled during an operation that keeps
        the engine out of service, it returns once the engine has ended the operation.
        """

    async def watch_blocks(self, receive: Callable[[BlockEvents], None]) -> None:
        """Pass on which blocks are in the prefix cache, and then each change; raises `EngineLost` at the end.

        The first events have `reset`, and so have the first ones after a gap. An engine that does not report its blocks
        passes on nothing.
        """

    async def watch_load(self, receive: Callable[[EngineLoad], None]) -> None:
        """Pass on the scheduler's load, and again when it has changed; raises `EngineLost` at the end."""
