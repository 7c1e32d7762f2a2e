"""Processor: a conversation in, text out; in between, token ids to and from a worker that decodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import trio

from actors.kit.calls import Answer, Askable, BugCounter, Call, Inbox
from actors.kit.offload import Offload, RunInThread
from actors.text.choices import Choices, Emit
from actors.text.encoding import TooManyTokens, tokenize_conversation, tokenize_text
from actors.text.model import TextModel
from actors.text.prompts import PromptLimits, echoed, encoded, generates, spelled
from protocol.errors import BadRequest, ContextTooLong, NotReady
from protocol.messages import Finished, Generate, Grammar, Started, Tokens
from protocol.text_messages import (
    Accepted,
    Answered,
    ChoiceEnded,
    Detokenize,
    Detokenized,
    Respond,
    Text,
    Tokenize,
    Tokenized,
)

TextRequest: TypeAlias = Respond | Tokenize | Detokenize
TextReply: TypeAlias = Accepted | Started | Text | ChoiceEnded
TextResult: TypeAlias = Answered | Tokenized | Detokenized

TOKENIZE_TOKENS_MAX = 262_144


GrammarCheck: TypeAlias = Callable[[Grammar, str], Awaitable[None]]
"""Has a grammar checked for the owner of a request; raises `BadRequest` if it is refused."""


async def unchecked(_: Grammar, __: str) -> None:
    """Accept every grammar: where no engine could be held by one."""
    await trio.lowlevel.checkpoint()


async def processor(
    inbox: Inbox[Call[TextRequest, TextReply, TextResult]],
    model: TextModel,
    decode: Askable[Generate, Started | Tokens, Finished],
    limits: Callable[[], PromptLimits | None],
    aside: RunInThread,
    requests_max: int,
    tokenize_tokens_max: int = TOKENIZE_TOKENS_MAX,
    check_grammar: GrammarCheck = unchecked,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer conversations and texts, at most `requests_max` requests at a time.

    `limits` says what a request may have at the moment, None while no engine has ever been ready; one that was admitted
    with fewer tokens has no more than those, since its asker has promised space for no more. What is only to be
    tokenised, or only to be read, may have `tokenize_tokens_max` tokens. Long work runs `aside`.
    """
    free = trio.Semaphore(requests_max)
    bugs = BugCounter()

    async def answered(request: TextRequest, answer: Answer[TextReply, TextResult]) -> TextResult:
        known = limits()
        if known is None or (isinstance(request, Respond) and request.total_max == 0):
            raise NotReady("no engine has been ready for this model yet")
        work = Offload(aside, request.owner)
        if isinstance(request, Respond):
            known = known.within(request.total_max)
            if request.grammar is not None:
                await _check_grammar(request, request.grammar, known, check_grammar)
            return await _respond(request, model, known, decode, work, partial(_speak, answer.put))
        if isinstance(request, Tokenize):
            return await _tokenized(request, model, known, tokenize_tokens_max, work)
        return await _detokenized(request, model, tokenize_tokens_max, work)

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


async def _check_grammar(request: Respond, grammar: Grammar, limits: PromptLimits, check: GrammarCheck) -> None:
    """Raise `BadRequest`, with the client's name of the field, for a grammar that no engine is to see."""
    await trio.lowlevel.checkpoint()
    if grammar.kind not in limits.info.grammars:
        await trio.lowlevel.checkpoint()
        return  # it is refused by another sentence
    try:
        await check(grammar, request.owner)
    except BadRequest as error:
        error.param = spelled(request, "grammar")
        raise


def _speak(put: Callable[[TextReply, int], None], reply: TextReply) -> None:
    put(reply, reply.tokens if isinstance(reply, Text) else 0)


async def _respond(
    request: Respond,
    model: TextModel,
    limits: PromptLimits,
    decode: Askable[Generate, Started | Tokens, Finished],
    work: Offload,
    speak: Emit,
) -> Answered:
    prompts = await encoded(request, model, limits, work)
    asked = generates(request, model, prompts, limits)
    echoes = await echoed(request, model, prompts, work) if request.echo else []
    speak(Accepted(sum(map(len, prompts))))
    return Answered(await Choices(request, model, decode, speak, echoes).read(asked))


async def _tokenized(
    request: Tokenize, model: TextModel, limits: PromptLimits, tokens_max: int, work: Offload
) -> Tokenized:
    try:
        if request.turns:
            ids = await tokenize_conversation(request.turns, model, tokens_max, work)
        else:
            ids = await tokenize_text(request.text, model, tokens_max, work, special=request.special)
        if len(ids) > tokens_max:
            raise TooManyTokens(str(len(ids)))  # noqa: TRY301  # it is told as that of a part is
    except TooManyTokens as error:
        what = "messages" if request.turns else "prompt"
        said = f"the text is {error} tokens long, and one that is only tokenised can have {tokens_max}"
        raise ContextTooLong(said, param=what) from None
    return Tokenized(ids, limits.total_max)


async def _detokenized(request: Detokenize, model: TextModel, tokens_max: int, work: Offload) -> Detokenized:
    if len(request.ids) > tokens_max:
        said = f"there are {len(request.ids)} tokens, and a list that is only read can have {tokens_max}"
        raise ContextTooLong(said, param="tokens")
    try:
        return Detokenized(await work.run(len(request.ids), partial(model.decode, request.ids)))
    except BadRequest as error:
        error.param = "tokens"
        raise
