"""The requests inside a TensorRT-LLM engine, and the parts of their answers on the way to the node.

The engine yields each request by itself. All steps of one turn of the event loop leave as one frame: the price
of a step on the node does not grow with the requests in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, field

from actors.engines.trtllm.host.library import Result
from actors.engines.trtllm.host.translation import AnswerPart, Reader
from protocol.link.frames import Begun, Ended, Step
from protocol.messages.generation import Generate, Tokens

if TYPE_CHECKING:
    from actors.engines.trtllm.host.image_input import SharedTensorList

NO_TOKENS = Tokens(())


@define(eq=False)
class TrtllmRequest:
    """One request inside the engine."""

    request: Generate
    stream: int
    reader: Reader
    task: asyncio.Task[None] | None = None
    result: Result | None = None  # None: the engine has not been asked yet
    begun: bool = False
    tokens: int = 0  # the number of its tokens so far
    left: bool = False  # whether its asker has left
    aborted: bool = False  # whether the engine has been asked to stop it
    waits_for_transfer: bool = False  # a decode's, until its first token: an abort would lose blocks
    shared: SharedTensorList | None = None  # the tensors that the engine has been given beside it
    state: bytes = b""  # of a prefill's: its prompt is computed and held

    def leave(self) -> None:
        """Note that its asker has left, and ask the engine to stop it as soon as possible."""
        self.left = True
        self.abort_if_safe()

    def abort_if_safe(self) -> None:
        """Ask the engine once to stop a request that has been left, unless a KV cache is on its way to it."""
        if self.left and not self.aborted and self.result is not None and not self.waits_for_transfer:
            self.aborted = True
            self.result.abort()


@define(eq=False)
class OutgoingSteps:
    """The parts of answers of this turn of the loop; `send` gets them as one frame at its end."""

    send: Callable[[Step], None]
    _streams: dict[int, None] = field(init=False, factory=dict)
    _step: Step | None = field(init=False, default=None)

    def add(self, running: TrtllmRequest, part: AnswerPart) -> None:
        """Add the next tokens of a request, and its end if it has ended."""
        if running.stream in self._streams:  # a frame has one part of each answer
            self.flush()
        if self._step is None:
            self._step = Step([], [], [], [], [], {})
            asyncio.get_running_loop().call_soon(self.flush)
        step, stream, tokens = self._step, running.stream, part.tokens or NO_TOKENS
        self._streams[stream] = None
        step.streams.append(stream)
        step.counts.append(len(tokens.ids))
        step.tokens.extend(tokens.ids)
        if not running.begun:
            running.begun = True
            step.begun.append(Begun(stream, part.cached_tokens))
        if running.request.logprobs is not None:
            step.logprobs[stream] = tokens.logprobs
        running.tokens += len(tokens.ids)
        if (end := part.ending) is not None:
            prompt_tokens = len(running.request.tokens)
            step.ended.append(Ended(stream, end.reason, prompt_tokens, running.tokens, part.cached_tokens, end.matched))

    def flush(self) -> None:
        """Send what there is."""
        step, self._step = self._step, None
        self._streams.clear()
        if step is not None:
            self.send(step)
