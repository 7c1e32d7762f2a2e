"""Processor: a conversation in, text out; in between, token ids to and from a worker that decodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import trio

from actors._kit import Answer, Asks, Bugs, Call
from actors._text.model import TextModel
from actors._text.reading import Reading
from protocol.errors import BadRequest, ContextTooLong, EngineLost, NotReady
from protocol.messages import (
    Accepted,
    EngineInfo,
    Finished,
    FinishReason,
    Generate,
    Respond,
    Sampling,
    Started,
    Text,
    Tokens,
    Usage,
)

T = TypeVar("T")
Aside = Callable[[Callable[[], T]], Awaitable[T]]
"""Runs a function that takes long somewhere else, so that this thread's tasks do not wait for it."""

TextReply: TypeAlias = Accepted | Started | Text

LONG_CHARACTERS = 2_000  # about a millisecond of tokenising
TURN_CHARACTERS = 32  # that a chat template puts around each turn


async def processor(
    inbox: trio.MemoryReceiveChannel[Call[Respond, TextReply, Finished]],
    model: TextModel,
    decode: Asks[Generate, Started | Tokens, Finished],
    limits: Callable[[], tuple[EngineInfo, int] | None],
    aside: Aside[list[int]],
    requests_max: int,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer conversations, at most `requests_max` at a time.

    `limits` says what the engine behind `decode` is and how many tokens it gives one request, or None before it is
    known.
    """
    free = trio.Semaphore(requests_max)
    bugs = Bugs()

    async def respond(call: Call[Respond, TextReply, Finished]) -> None:
        try:
            with call.answering(bugs) as answer:
                if (known := limits()) is None:
                    raise NotReady("no engine has been ready for this model yet")
                tokens = await _encoded(call.request, model, aside)
                generate = _generate(call.request, model, tokens, *known)
                answer.put(Accepted(len(tokens)), 0)
                answer.end(await _answered(call.request, model, generate, decode, answer))
        finally:
            free.release()

    async with trio.open_nursery() as requests:
        task_status.started()
        while True:
            await free.acquire()
            requests.start_soon(respond, await inbox.receive())


async def _encoded(request: Respond, model: TextModel, aside: Aside[list[int]]) -> list[int]:
    if sum(len(turn.content) + TURN_CHARACTERS for turn in request.turns) < LONG_CHARACTERS:
        await trio.lowlevel.checkpoint()
        return model.encode(request.turns)
    return await aside(lambda: model.encode(request.turns))


async def _answered(
    request: Respond,
    model: TextModel,
    generate: Generate,
    decode: Asks[Generate, Started | Tokens, Finished],
    answer: Answer[TextReply, Finished],
) -> Finished:
    """Relay the worker's tokens as text, and return how the answer ended."""
    eos = frozenset[int]() if request.ignore_eos else model.eos_token_ids
    reading = Reading(model.tokenizer, request.stop, frozenset(request.stop_token_ids), eos, request.tokens_min)
    cached_tokens = 0

    def pass_on(reply: Started | Tokens) -> None:
        nonlocal cached_tokens
        if isinstance(reply, Started):
            cached_tokens = reply.cached_tokens
            answer.put(reply, 0)
            return
        if (text := reading.feed(reply.ids)) is not None:
            answer.put(text, text.tokens)
        if reading.matched is not None:
            generation.enough()  # leaving aborts the engine: what it computes from here on is for nobody

    async with decode.ask(generate, generate.sampling.tokens_max) as generation:
        finished = await generation.relay(pass_on)
    if (text := reading.finish()) is not None:
        answer.put(text, text.tokens)
    if reading.matched is not None:
        usage = Usage(len(generate.tokens), reading.tokens, cached_tokens)
        return Finished(FinishReason.STOP, usage, reading.matched)
    if finished is None:
        raise EngineLost("the answer ended without saying how")
    return finished


def _generate(request: Respond, model: TextModel, tokens: list[int], info: EngineInfo, most: int) -> Generate:
    """Return what to ask of the worker; raises `BadRequest` for what its engine could not take as it is."""
    if len(tokens) >= most:
        raise ContextTooLong(
            f"the prompt is {len(tokens)} tokens long, and prompt and answer together can have {most}",
            param=_spelled(request, "turns"),
        )
    room = most - len(tokens)
    tokens_max = room if request.tokens_max is None else request.tokens_max
    if tokens_max > room:
        raise ContextTooLong(
            f"the prompt is {len(tokens)} tokens long, and {tokens_max} more are asked for;"
            f" together they can have {most}",
            param=_spelled(request, "tokens_max"),
        )
    if request.tokens_min > tokens_max:
        raise BadRequest(
            f"at least {request.tokens_min} tokens are asked for, and at most {tokens_max}",
            param=_spelled(request, "tokens_min"),
        )
    if any(token >= info.vocabulary_size for token in request.stop_token_ids):
        raise BadRequest(
            f"the model's token ids end at {info.vocabulary_size - 1}", param=_spelled(request, "stop_token_ids")
        )
    own = model.defaults
    sampling = Sampling(
        tokens_max=tokens_max,
        tokens_min=request.tokens_min,
        temperature=own.temperature if request.temperature is None else request.temperature,
        top_p=own.top_p if request.top_p is None else request.top_p,
        top_k=own.top_k if request.top_k is None else request.top_k,
        min_p=own.min_p if request.min_p is None else request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=own.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        seed=request.seed,
    )
    return Generate(request.id, tokens, sampling)


def _spelled(request: Respond, name: str) -> str:
    """Return the client's own name of a field."""
    return request.params.get(name, name)
