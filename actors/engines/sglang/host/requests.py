"""The requests inside the engine, and the scheduler's steps as frames for their askers.

A token must stay cheap: a step is one pass over its requests, and its arrays go into the frame as they have come.
Events that come once in a request's life, or to few requests, have functions of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import accumulate

from attrs import define, frozen
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.sglang.host import translation
from actors.engines.sglang.host.outputs import EngineFinishReason, StepOutput
from protocol.errors import AskerLeft, RequestError
from protocol.link.frames import Begun, Ended, Step
from protocol.messages.adapters import Adapter
from protocol.messages.generation import Finished, FinishReason, Started, Tokens, Usage


@define(eq=False)
class Running:
    """One request inside the engine."""

    id: str
    stream: int
    logprobs: int | None = None  # how many of the likeliest tokens are reported
    scored_tokens: int | None = None  # how many of its prompt's log probabilities are reported
    adapter: Adapter | None = None
    task: asyncio.Task[None] | None = None
    begun: bool = False
    version: str = ""  # of the weights that compute it, as last announced
    # Whether its beginning and the present weights have been announced, if they have to be.
    announced: bool = False
    tokens: int = 0  # the number of its tokens so far
    state: bytes = b""  # a prefill's in a sequential hand-off: its whole answer
    is_held: bool = False  # whether the decode has the KV cache, and its asker has yet to leave
    is_left: bool = False  # whether its asker has left, and the scheduler has to end it

    def announce(self, version: str) -> None:
        """Note that its beginning and this version have been announced."""
        self.begun = self.announced = True
        self.version = version


@frozen
class SeparatePart:
    """The next part of an answer that is in no frame of others; `result` is there at its end."""

    running: Running
    replies: tuple[Started | Tokens, ...]
    result: Finished | None


class Requests:
    """The requests that run, by their ids and by their streams, and SGLang's own records of them."""

    def __init__(self, manager: TokenizerManager, release_adapter: Callable[[Adapter], None]) -> None:
        self.manager = manager
        self.release_adapter = release_adapter
        self.by_id: dict[str, Running] = {}
        self.by_stream: dict[int, Running] = {}
        self._version = ""  # of the weights, in the latest step

    def add(self, running: Running) -> None:
        """Add a request."""
        self.by_id[running.id] = self.by_stream[running.stream] = running

    def remove(self, running: Running) -> None:
        """Remove a request from these records alone."""
        del self.by_id[running.id], self.by_stream[running.stream]
        if running.adapter is not None:
            self.release_adapter(running.adapter)

    def step(self, output: StepOutput) -> tuple[Step, list[SeparatePart], list[tuple[int, RequestError]]]:
        """Return the frame of a step, by one pass over its requests, and the streams that failed in it.

        The answers with the log probabilities of their prompts are apart: these are attached, and a frame of several
        streams waits for no attachment.
        """
        if output.version != self._version:
            self._version = output.version
            for each in self.by_id.values():
                each.announced = False
        streams: list[int] = []
        step = Step(streams, output.counts, output.tokens, [], [])
        parts: list[SeparatePart] = []
        failed: list[tuple[int, RequestError]] = []
        foreign: list[int] = []  # indices of the requests that get nothing in this frame
        for index, (request_id, count) in enumerate(zip(output.ids, output.counts, strict=True)):
            running = self.by_id.get(request_id)
            finish = output.finished.get(index)
            if running is None or (not count and finish is None and not running.state):  # a diffusion model's block
                foreign.append(index)
            elif finish is not None and translation.is_failure(finish.reason):
                foreign.append(index)  # its tokens are garbage where the scheduler found an error
                failed.append((running.stream, translation.abort_error(finish.reason)))
                self._forget(running, finish.reason)
            elif running.state:
                foreign.append(index)
                self._hold(running, output, index, parts, failed)
            else:
                streams.append(running.stream)
                running.tokens += count
                if not running.announced or finish is not None or running.logprobs is not None:
                    if running.scored_tokens is None:
                        self._add_rarities(step, running, output, index)
                    else:
                        streams.pop()
                        foreign.append(index)
                        parts.append(self._part(running, output, index))
        if foreign:
            self._take_out(output, foreign)
        return step, parts, failed

    def _hold(
        self,
        running: Running,
        output: StepOutput,
        index: int,
        parts: list[SeparatePart],
        failed: list[tuple[int, RequestError]],
    ) -> None:
        """Send the state of a prompt that has just been computed, and hold its request until that is left."""
        finish = output.finished.get(index)
        if finish is not None and running.is_left:  # the decode had the KV cache before the scheduler knew
            failed.append((running.stream, AskerLeft("the asker left")))
            self._forget(running, finish.reason)
            return
        running.is_held = finish is not None
        if not running.begun:
            running.begun = True
            started = Started(output.cached_tokens[index], hand_off=running.state, version=output.version)
            parts.append(SeparatePart(running, (started,), None))

    def _add_rarities(self, step: Step, running: Running, output: StepOutput, index: int) -> None:
        """Add to a frame the rare parts: the beginning, new weights, log probabilities, the end."""
        cached_tokens, finish = output.cached_tokens[index], output.finished.get(index)
        if not running.announced:
            if not running.begun or running.version != output.version:
                step.begun.append(Begun(running.stream, cached_tokens, output.version, running.begun))
            running.announce(output.version)
        if running.logprobs is not None:
            step.logprobs[running.stream] = translation.logprobs(output.logprobs.get(index), running.logprobs)
        if finish is not None:
            reason, matched = FinishReason(finish.reason["type"]), finish.reason.get("matched")
            step.ended.append(
                Ended(running.stream, reason, finish.prompt_tokens, running.tokens, cached_tokens, matched)
            )
            self._forget(running, finish.reason)

    def _part(self, running: Running, output: StepOutput, index: int) -> SeparatePart:
        """Return the next part of an answer with the log probabilities of its prompt."""
        begin, count = sum(output.counts[:index]), output.counts[index]
        cached_tokens, finish = output.cached_tokens[index], output.finished.get(index)
        assert running.scored_tokens is not None
        replies: list[Started | Tokens] = []
        if not running.begun:
            scored = output.scored.get(index)
            scores = None if scored is None else translation.scores(scored, running.scored_tokens)
            replies.append(Started(cached_tokens, scores=scores, version=output.version))
        elif running.version != output.version:
            replies.append(Tokens((), version=output.version))
        running.announce(output.version)
        if count:
            ids = tuple(output.tokens[begin : begin + count])
            replies.append(Tokens(ids, translation.logprobs(output.logprobs.get(index), running.logprobs or 0)))
        if finish is None:
            return SeparatePart(running, tuple(replies), None)
        reason, matched = FinishReason(finish.reason["type"]), finish.reason.get("matched")
        self._forget(running, finish.reason)
        usage = Usage(finish.prompt_tokens, running.tokens, cached_tokens)
        return SeparatePart(running, tuple(replies), Finished(reason, usage, matched))

    def _take_out(self, output: StepOutput, indices: list[int]) -> None:
        """Take the tokens of some requests out of a step, and give those of the warm-up to SGLang's own records."""
        ends = list(accumulate(output.counts))
        for index in reversed(indices):
            begin, end = ends[index] - output.counts[index], ends[index]
            finish = output.finished.get(index)
            if begin < end or finish is not None:
                self._give_sglang(
                    output.ids[index], output.tokens[begin:end], None if finish is None else finish.reason
                )
            del output.tokens[begin:end], output.counts[index]

    def _forget(self, running: Running, reason: EngineFinishReason) -> None:
        """End a request in our records and in SGLang's."""
        self.remove(running)
        self._give_sglang(running.id, [], reason)

    def _give_sglang(self, request_id: str, tokens: list[int], reason: EngineFinishReason | None) -> None:
        """Give tokens and perhaps an end to SGLang's records of a request, as its own handler would."""
        state = self.manager.rid_to_state.get(request_id)
        if state is None:
            return
        if reason is not None:
            del self.manager.rid_to_state[request_id]
            state.finished = True
            if self.manager.enable_trace:
                state.time_stats.set_finished_time()  # its span is exported once it has ended
            self.manager._release_lora_once(state)  # noqa: SLF001
        state.out_list.append({"output_ids": tokens, "meta_info": {"id": request_id, "finish_reason": reason}})
        state.event.set()
