"""Processor: a conversation in, text out; in between, token ids to and from a worker that decodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

import trio

from actors._kit import Answer, Asks, Bugs, Call, Inbox
from actors._text.choices import Choices, Speak
from actors._text.model import TextModel
from actors._text.prompts import Limits, characters, echoed, encoded, generates
from protocol.errors import BadRequest, NotReady
from protocol.messages import (
    Accepted,
    Answered,
    ChoiceEnded,
    Detokenize,
    Detokenized,
    Finished,
    Generate,
    Respond,
    Started,
    Text,
    Tokenize,
    Tokenized,
    Tokens,
)

T = TypeVar("T")

TextRequest: TypeAlias = Respond | Tokenize | Detokenize
TextReply: TypeAlias = Accepted | Started | Text | ChoiceEnded
TextResult: TypeAlias = Answered | Tokenized | Detokenized

LONG_CHARACTERS = 2_000  # about a millisecond of tokenising
LONG_IDS = 2_000


class Aside(Protocol):
    """Runs a function that takes long somewhere else, so that this thread's tasks do not wait for it."""

    async def __call__(self, function: Callable[[], T], /) -> T:
        """Return what the function returns, or raise what it raises."""


async def processor(
    inbox: Inbox[Call[TextRequest, TextReply, TextResult]],
    model: TextModel,
    decode: Asks[Generate, Started | Tokens, Finished],
    limits: Callable[[], Limits | None],
    aside: Aside,
    requests_max: int,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer conversations and texts, at most `requests_max` requests at a time.

    `limits` says what a request may have at the moment, None while no engine has ever been ready.
    """
    free = trio.Semaphore(requests_max)
    bugs = Bugs()

    async def answered(request: TextRequest, answer: Answer[TextReply, TextResult]) -> TextResult:
        if (known := limits()) is None:
            raise NotReady("no engine has been ready for this model yet")
        if isinstance(request, Respond):
            return await _respond(request, model, known, decode, aside, partial(_speak, answer.put))
        if isinstance(request, Tokenize):
            return await _tokenized(request, model, known, aside)
        return await _detokenized(request, model, aside)

    async def answer_one(call: Call[TextRequest, TextReply, TextResult]) -> None:
        try:
            with call.answering(bugs) as answer:
                answer.end(await answered(call.request, answer))
        finally:
            free.release()

    async with trio.open_nursery() as requests:
        task_status.started()
        while True:
            await free.acquire()
            requests.start_soon(answer_one, await inbox.receive())


def _speak(put: Callable[[TextReply, int], None], reply: TextReply) -> None:
    put(reply, reply.tokens if isinstance(reply, Text) else 0)


async def _respond(
    request: Respond,
    model: TextModel,
    limits: Limits,
    decode: Asks[Generate, Started | Tokens, Finished],
    aside: Aside,
    speak: Speak,
) -> Answered:
    prompts = await _perhaps(aside, characters(request) >= LONG_CHARACTERS, lambda: encoded(request, model, limits))
    asked = generates(request, model, prompts, limits)
    length = sum(map(len, prompts))
    echoes: list[str] = []
    if request.echo:
        echoes = await _perhaps(aside, length >= LONG_IDS, lambda: echoed(request, model, prompts))
    speak(Accepted(length))
    return Answered(await Choices(request, model, decode, speak, echoes).read(asked))


async def _tokenized(request: Tokenize, model: TextModel, limits: Limits, aside: Aside) -> Tokenized:
    def encode() -> list[int]:
        if request.turns:
            return model.encode(request.turns)
        return model.encode_text(request.text, special=request.special)

    long = len(request.text) + sum(len(turn.content) for turn in request.turns) >= LONG_CHARACTERS
    return Tokenized(await _perhaps(aside, long, encode), limits.total_max)


async def _detokenized(request: Detokenize, model: TextModel, aside: Aside) -> Detokenized:
    def decode() -> str:
        try:
            return model.decode(request.ids)
        except BadRequest as error:
            error.param = "tokens"
            raise

    return Detokenized(await _perhaps(aside, len(request.ids) >= LONG_IDS, decode))


async def _perhaps(aside: Aside, long: bool, function: Callable[[], T]) -> T:
    """Run a function here, or aside if it takes long."""
    if long:
        return await aside(function)
    await trio.lowlevel.checkpoint()
    return function()
