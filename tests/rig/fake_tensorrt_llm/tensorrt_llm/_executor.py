"""The executor: the batch of each rank, one step after the other, and the answers as their askers see them."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

from attrs import define, field

from . import _states
from ._adapters import Adapters
from ._cache import Cache
from ._faults import AFTER_TOKENS, DEATH_CODE, Fault
from ._model import Place, digest, draw, place_of
from ._types import (
    CompletionOutput,
    DisaggregatedParams,
    Logprob,
    MemoryType,
    RequestError,
    SamplingParams,
)

STEP_S = float(os.environ.get("ESPALIER_FAKE_TRTLLM_STEP_S", "0.002"))
TRANSFER_STEPS = 3
STATS_MAX = 1000


class Stage(Enum):
    WAITING = "waiting"
    TRANSFER = "transfer"  # a decode waits for its KV cache
    RUNNING = "running"
    HELD = "held"  # a prefill has answered, and its KV cache is there
    OVER = "over"


@define
class Response:
    """What a step has for one request."""

    tokens: list[int] = field(factory=list)
    logprobs: list[Any] = field(factory=list)  # all so far
    finish: str | None = None
    stop: int | None = None
    handed: DisaggregatedParams | None = None
    prompt_logprobs: list[dict[int, Logprob]] = field(factory=list)
    cached: int = 0
    error: Exception | None = None


@define(eq=False)
class Request:
    """One request in the engine."""

    number: int
    prompt: list[int]
    params: SamplingParams
    streaming: bool
    handed: DisaggregatedParams | None
    salt: str | None
    known: int  # what the model knows of the adapter and of images
    priority: float
    rank: int
    fault: Fault | None
    responses: "asyncio.Queue[Response]" = field(factory=asyncio.Queue)
    stage: Stage = Stage.WAITING
    answer: list[int] = field(factory=list)
    logprobs: list[Any] = field(factory=list)
    blocks: int = 0
    steps: int = 0  # of its transfer
    cached: int = 0
    unsent: int = 0  # tokens of an answer that is not streamed
    aborted: bool = False
    lora: int | None = None  # its adapter's number
    state: bytes = b""
    pictured: bool = False  # it has images, whose blocks are reported by no event of this fake
    hashes: tuple[tuple[int, ...], ...] = ()  # of its images

    @property
    def kind(self) -> str:
        return (self.handed and self.handed.request_type) or "context_and_generation"


class RequestOutput:
    """The answer of a request: it yields itself at each step, and its outputs grow."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.request_id = request.number
        self.prompt_token_ids = request.prompt
        self.prompt = None
        self.outputs = [CompletionOutput(index=0)]
        self.finished = False
        self.cached_tokens = 0
        self.error: str | None = None
        self.metrics_dict: dict[str, float] = {}
        self.disaggregated_params: DisaggregatedParams | None = None  # of an encoder's request

    def abort(self) -> None:
        """Ask for the end of the answer; there is no acknowledgement but that end."""
        self._request.aborted = True

    def result(self, timeout: float | None = None) -> "RequestOutput":
        """Wait for the end; here only an encoder's request can be waited for so."""
        del timeout
        assert self.finished
        return self

    def aborted(self) -> bool:
        return self._request.aborted

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        response = await self._request.responses.get()
        if response.error is not None:
            self.finished, self.error = True, str(response.error)
            raise response.error
        output = self.outputs[0]
        output.token_ids.extend(response.tokens)
        output.logprobs = response.logprobs
        output.prompt_logprobs = response.prompt_logprobs or output.prompt_logprobs
        output.disaggregated_params = response.handed or output.disaggregated_params
        output.finish_reason, output.stop_reason = response.finish, response.stop
        if response.stop is not None and not self._request.params.include_stop_str_in_output:
            output.token_ids = output.token_ids[:-1]
        self.cached_tokens = response.cached
        self.finished = response.finish is not None
        return self


class Executor:
    """The batches of all ranks; its task ends by itself when nothing is left to do."""

    def __init__(self, caches: list[Cache], *, vocabulary: int, batch_max: int, tokens_max: int, stats: bool) -> None:
        self.caches = caches
        self.vocabulary = vocabulary
        self.batch_max = batch_max
        self.tokens_max = tokens_max  # of a prompt and its answer
        self.adapters: Adapters | None = None
        self.by_priority = False
        self.transfers = False  # whether it is a leg of a pair
        self.hold_s: float | None = None
        self.requests: list[Request] = []
        self.computed = dict[object, int]()  # what the model knew of each prompt, as long as it is cached
        self.stats: deque[dict[str, Any]] | None = deque(maxlen=STATS_MAX) if stats else None
        self.steps = 0
        self.asleep = set[MemoryType]()  # what is released
        self._fatal_error: Exception | None = None
        self._shut_down = False
        self._task: asyncio.Task[None] | None = None

    def is_shutdown(self) -> bool:
        return self._shut_down

    def check_health(self) -> bool:
        return not self._shut_down and self._fatal_error is None

    def submit(self, request: Request) -> None:
        if request.kind != "generation_only":
            self._reuse(request)
        self.requests.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _reuse(self, request: Request) -> None:
        """Answer by the KV memory of an earlier request that has the same key, whatever its images were."""
        if self.caches[request.rank].reuses:
            key = request.rank, request.salt, request.lora, request.hashes, tuple(request.prompt)
            request.known = self.computed.setdefault(key, request.known)

    def shutdown(self) -> None:
        """End all answers with an error."""
        self._shut_down = True
        self.fail(RuntimeError("LLM is shutting down"))

    def fail(self, error: Exception) -> None:
        for request in [*self.requests]:
            self._end(request, Response(error=error))

    async def _run(self) -> None:
        while self.requests:
            await asyncio.sleep(STEP_S)
            try:
                self._step()
            except Exception as error:
                self._fatal_error = error
                self.fail(error)
                raise

    # A step ------------------------------------------------------------------------------

    def _step(self) -> None:
        self.steps += 1
        for request in [*self.requests]:
            if request.aborted:
                self._abort(request)
        for rank in range(len(self.caches)):
            self._admit(rank)
        for request in [*self.requests]:
            if request.stage is Stage.TRANSFER:
                self._transfer(request)
            elif request.stage is Stage.RUNNING:
                self._advance(request)
            elif request.stage is Stage.HELD and not _states.is_held(request.state):
                self._leave(request)
        if self.stats is not None:
            self.stats.extend(self._stat(rank) for rank in range(len(self.caches)))

    def _abort(self, request: Request) -> None:
        if request.fault in {Fault.ABORT_IGNORED, Fault.TRANSFER_HANGS, Fault.STUCK}:
            return
        if request.stage is Stage.HELD:  # its asker has the whole answer already
            _states.free(request.state)
            self._leave(request)
            return
        leaks = request.stage is Stage.TRANSFER  # its blocks are those that are being written to
        self._end(request, Response(finish="cancelled", logprobs=request.logprobs), leaks=leaks)

    def _admit(self, rank: int) -> None:
        waiting = [each for each in self.requests if each.rank == rank and each.stage is Stage.WAITING]
        if self.by_priority:
            waiting.sort(key=lambda each: -each.priority)
        running = sum(each.rank == rank and each.stage in {Stage.RUNNING, Stage.TRANSFER} for each in self.requests)
        cache = self.caches[rank]
        for request in waiting[: max(0, self.batch_max - running)]:
            blocks = cache.blocks(min(len(request.prompt) + request.params.max_tokens, self.tokens_max))
            request.cached = 0 if request.pictured else cache.found(request.prompt, request.salt, request.lora)
            if not self._has_adapter(request):
                continue
            if cache.reads_lost(request.prompt, request.salt, request.lora):
                request.known = digest([request.known], 1)  # an answer by whatever is in the memory
            if not cache.make_room(blocks):
                return
            request.blocks = blocks
            cache.used += blocks
            request.stage = Stage.TRANSFER if request.kind == "generation_only" else Stage.RUNNING

    def _has_adapter(self, request: Request) -> bool:
        """Whether the adapter of a request can be used now; one that is fetched for is never looked after."""
        if request.lora is None or self.adapters is None:
            return True
        if request.kind == "generation_only":
            self._fatal_error = RuntimeError(f"Caught exception during copyTask ensure batch -- no task {request.lora}")
            self.fail(self._fatal_error)
            return False
        running = [each.lora for each in self.requests if each.lora is not None and each.stage is Stage.RUNNING]
        return self.adapters.fits(request.lora, running)

    def _transfer(self, request: Request) -> None:
        request.steps += 1
        if request.fault is Fault.TRANSFER_HANGS or request.steps < TRANSFER_STEPS:
            return
        handed = request.handed
        known = None if handed is None else _states.take(handed.opaque_state or b"-", handed.ctx_dp_rank)
        if handed is None or not handed.first_gen_tokens or known is None:
            self._end(
                request, Response(error=RequestError("the KV cache could not be fetched from the context server"))
            )
            return
        request.stage, request.known = Stage.RUNNING, known  # it is in the KV cache
        self._reuse(request)
        request.cached = len(request.prompt)  # TensorRT-LLM counts what was fetched
        self._append(request, handed.first_gen_tokens[0])

    def _advance(self, request: Request) -> None:
        if request.fault is Fault.STUCK:
            return
        if len(request.answer) >= AFTER_TOKENS and self._fails(request):
            return
        place = self._place(request, request.answer)
        self._append(request, draw(place, request.params, len(request.answer)))

    def _fails(self, request: Request) -> bool:
        """Let a fault in the middle of an answer happen; whether the request is over by it."""
        match request.fault:
            case Fault.DEATH:
                os._exit(DEATH_CODE)
            case Fault.FATAL:
                self._fatal_error = RuntimeError("CUDA error: an illegal memory access was encountered")
                self.fail(self._fatal_error)
            case Fault.SHUT_DOWN:
                self.shutdown()
            case Fault.REQUEST_ERROR:
                self._end(request, Response(error=RequestError("the request could not be computed")))
            case Fault.CANCELLED | Fault.TIMEOUT:
                finish = "cancelled" if request.fault is Fault.CANCELLED else "timeout"
                self._end(request, Response(finish=finish, logprobs=request.logprobs))
            case _:
                return False
        return True

    def _place(self, request: Request, answer: list[int]) -> Place:
        known = digest([*request.prompt, *answer], request.known)
        return place_of(known, self.vocabulary, request.params, request.prompt, answer)

    def _append(self, request: Request, token: int) -> None:
        """Give a request its next token."""
        params, is_first = request.params, not request.answer
        place = self._place(request, request.answer)
        request.answer.append(token)
        request.unsent += 1
        if params.logprobs is not None:
            request.logprobs = self._logprobs(request, place.top(params.logprobs, token))
        response = Response(logprobs=request.logprobs, cached=request.cached)
        if is_first:
            if not request.pictured:
                self.caches[request.rank].store(request.prompt, request.salt, request.lora)
            if params.prompt_logprobs is not None:
                response.prompt_logprobs = self._prompt_logprobs(request)
        response.finish, response.stop = self._finish(request, token)
        if request.kind == "context_only":
            response.handed = self._hand_over(request, response)
        if response.finish is None and not request.streaming:
            return
        response.tokens, request.unsent = request.answer[-request.unsent :], 0
        if response.finish is None or request.stage is Stage.HELD:
            request.responses.put_nowait(response)
        else:
            self._end(request, response)

    def _finish(self, request: Request, token: int) -> tuple[str | None, int | None]:
        """Return the reason of the end and the stop token behind it, as far as the answer ends with a token."""
        params, total = request.params, len(request.prompt) + len(request.answer)
        if token == params.end:
            return "stop", None
        if token in params.stops:
            return "stop", token
        if request.kind == "context_only":
            return "length", None
        return ("length" if len(request.answer) >= params.max_tokens or total >= self.tokens_max else None), None

    def _hand_over(self, request: Request, response: Response) -> DisaggregatedParams:
        """Hold the KV cache of a prompt for its decode, unless its answer has ended already."""
        handed = request.handed or DisaggregatedParams()
        held = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[*request.answer],
            ctx_request_id=request.number,
            disagg_request_id=handed.disagg_request_id,
            ctx_dp_rank=request.rank if len(self.caches) > 1 else None,
        )
        if response.finish == "length":
            request.state = held.opaque_state = _states.hold(request.known, held.ctx_dp_rank)
            request.stage = Stage.HELD
            if self.hold_s is not None:
                asyncio.get_running_loop().call_later(self.hold_s, _states.free, request.state)
        return held

    def _logprobs(self, request: Request, place: dict[int, Logprob]) -> list[Any]:
        own: Any = place
        if request.fault is Fault.LOGPROBS_FLOATS:
            own = place[request.answer[-1]].logprob
        elif request.fault is Fault.LOGPROB_MISSING:
            own = {token: each for token, each in place.items() if token != request.answer[-1]}
        so_far = [*request.logprobs[: len(request.answer) - 1], own]
        return [*so_far, own] if request.fault is Fault.LOGPROBS_AHEAD else so_far

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob]]:
        """Return the log probabilities behind each token of a prompt; of cached ones there are none."""
        prompt, count = request.prompt, request.params.prompt_logprobs or 0
        following = [*prompt[1:], request.answer[0]]
        found, known = [], request.known
        for place, token in enumerate(following):
            known = digest(prompt[place : place + 1], known)
            if place >= request.cached:
                found.append(Place(known, self.vocabulary).top(count, token))
        return found

    # The end of a request ------------------------------------------------------------------

    def _end(self, request: Request, response: Response, *, leaks: bool = False) -> None:
        response.cached = response.cached or request.cached
        request.responses.put_nowait(response)
        if request.state:
            _states.free(request.state)
        self._leave(request, leaks=leaks)

    def _leave(self, request: Request, *, leaks: bool = False) -> None:
        """Free the blocks of a request."""
        cache = self.caches[request.rank]
        if request.answer and not request.pictured:
            cache.store([*request.prompt, *request.answer[:-1]], request.salt, request.lora, ended=True)
        if not leaks:
            cache.used -= request.blocks
        request.stage = Stage.OVER
        self.requests.remove(request)

    def _stat(self, rank: int) -> dict[str, Any]:
        mine = [each for each in self.requests if each.rank == rank]
        waiting = [each for each in mine if each.stage is Stage.WAITING]
        running = [each for each in mine if each.stage is Stage.RUNNING]
        cache, is_first = self.caches[0], rank == 0  # the others repeat the memory of the first, and have no queue
        stat: dict[str, Any] = {
            "iter": self.steps,
            "iterLatencyMS": 1000 * STEP_S,
            "numActiveRequests": len(mine) - len(waiting),
            "numQueuedRequests": is_first * len(waiting),
            "kvCacheStats": {
                "maxNumBlocks": cache.blocks_max,
                "freeNumBlocks": cache.blocks_max - cache.used,
                "usedNumBlocks": cache.used,
                "tokensPerBlock": cache.block_tokens,
            },
            "inflightBatchingStats": {
                "numScheduledRequests": len(running),
                "numContextRequests": 0,
                "numGenRequests": len(running),
                "numPausedRequests": 0,
                "numCtxTokens": 0,
                "numCtxKvTokens": 0,
                "numGenKvTokens": sum(len(each.prompt) + len(each.answer) for each in running),
                "numQueuedContextRequests": is_first * len(waiting),
                "numQueuedCtxTokens": is_first * sum(len(each.prompt) for each in waiting),
                "numQueuedGenRequests": is_first * sum(each.stage is Stage.TRANSFER for each in mine),
                "numQueuedGenKvTokens": 0,
                "numPausedKvTokens": 0,
            },
        }
        return stat if len(self.caches) == 1 else {**stat, "attentionDpRank": rank}


async def drained(queues: list[deque[dict[str, Any]]], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
    """Yield all that is there, and what comes until nothing has come for `timeout` seconds."""
    waited_s = 0.0
    while True:
        for queue in queues:
            while queue:
                waited_s = 0.0
                yield queue.popleft()
        if timeout is not None and waited_s >= timeout:
            return
        await asyncio.sleep(STEP_S)
        waited_s += STEP_S
