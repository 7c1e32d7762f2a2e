"""Processor: conversations and texts to token ids, and token ids to the text of answers.

It stands between the gateway, which serves clients, and the router of a model. It alone has the tokenizer and the chat
template. So engines compute token ids and nothing else, and stop strings, log probabilities as text and the choices of
one request are the same on every engine.

A request passes three steps: it is prepared, it is asked for, and its text is emitted. Replies are handled in the task
that puts them (see `actors/kit/calls.py`), where nothing long may be computed. Work of a client's choice goes through
`Offload` into threads, which take turns between the owners of requests. The processor has no engine and no worker,
keeps nothing of a request after its end, and never asks for more tokens than its answer needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol, TypeAlias

import trio
from attrs import evolve, frozen

from actors.kit.calls import Answer, Askable, BugCounter, Call, Inbox
from actors.kit.direct import Answerer, DirectCalls
from actors.kit.offload import Offload, RunInThread, RunWork
from actors.media.preparation import Vision, media_stage
from actors.text.call_grammar import HeldCalls
from actors.text.call_grammars import CHARACTER_WORK, CallGrammars, refused_as_tools
from actors.text.candidates import Emit
from actors.text.choices import Choices
from actors.text.conformance import Conformance
from actors.text.encoding import tokenize_conversation
from actors.text.engine_grammar import engine_grammar
from actors.text.first_parts import TooManyTokens
from actors.text.formats.tool_table import ToolTable
from actors.text.generations import make_generations
from actors.text.judging import CallConformance, Judges
from actors.text.limits import PromptLimits
from actors.text.model import TextModel
from actors.text.prompt_blocks import with_blocks
from actors.text.prompt_cache import PromptCache
from actors.text.prompt_reuse import PromptReuse, SelfCheck
from actors.text.prompts import encode_prompts
from actors.text.stop_strings import StopStrings
from actors.text.thought_grammar import grammar_behind_thought, has_marks, whole_format
from actors.text.tokenizing import TOKENIZE_TOKENS_MAX, check_count, detokenize, tokenize_only, too_long
from protocol.errors import BadRequest, NotReady, Unsupported
from protocol.messages.generation import Finished, Generate, Grammar, GrammarKind, Started, Tokens
from protocol.messages.text import (
    Accepted,
    Answered,
    AnswerPiece,
    CallPart,
    ChoiceEnded,
    Detokenize,
    Detokenized,
    Reasoning,
    Respond,
    Text,
    Tokenize,
    Tokenized,
)

TextRequest: TypeAlias = Respond | Tokenize | Detokenize
TextReply: TypeAlias = Accepted | Started | AnswerPiece | ChoiceEnded
TextResult: TypeAlias = Answered | Tokenized | Detokenized

# The work for one character of a stop string, in characters to tokenise.
STOP_CHARACTER_WORK = 4
# The characters of JSON that are read with the work of a character to tokenise.
JSON_CHARACTERS = 16
FREE = Judges()  # of a request whose answer keeps to nothing


class GrammarCheck(Protocol):
    """The check of a grammar before an engine gets it."""

    async def __call__(self, grammar: Grammar, owner: str, /, *, decided: bool = False) -> Grammar:
        """Return the grammar that an engine gets for the owner's; raises `BadRequest` for one that is refused.

        A grammar that is `decided` is the engine's already, and is only tried.
        """


class Constrain(Protocol):
    """Holds one request to its grammars."""

    async def __call__(self, thinking: bool, /) -> tuple[Respond, Judges]:
        """Return the request with the grammar that engines get, and the judges of its choices."""


async def accept_any_grammar(grammar: Grammar, _: str, /, *, decided: bool = False) -> Grammar:  # noqa: ARG001
    """Accept every grammar, for engines without a limit on them."""
    await trio.lowlevel.checkpoint()
    return grammar


async def processor(
    inbox: Inbox[Call[TextRequest, TextReply, TextResult]],
    model: TextModel,
    decode: Askable[Generate, Started | Tokens, Finished],
    limits: Callable[[], PromptLimits | None],
    run_in_thread: RunInThread,
    requests_max: int,
    check_grammar: GrammarCheck = accept_any_grammar,
    direct: DirectCalls[TextRequest, TextReply, TextResult] | None = None,
    vision: Vision | None = None,
    prompt_cache: PromptCache | None = None,
    tokenize_tokens_max: int = TOKENIZE_TOKENS_MAX,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer conversations and texts, at most `requests_max` requests at a time.

    `limits` returns the present limits of a request, None until the first engine is ready. A request that was admitted
    with a smaller limit keeps it: its asker has promised no more credit. `tokenize_tokens_max` bounds `Tokenize` and
    `Detokenize`. Long work runs in threads. Without `vision`, images and videos are refused.
    """
    free, bugs = trio.Semaphore(requests_max), BugCounter()
    direct, held = direct or DirectCalls(), CallGrammars((model.tool_use or model).answers)

    async def result_of(request: TextRequest, answer: Answer[TextReply, TextResult]) -> TextResult:
        current = _present(limits(), request)
        run = Offload(run_in_thread, request.owner).run
        if isinstance(request, Detokenize):
            return await detokenize(request, model, tokenize_tokens_max, run)
        served = model.serving(request.turns, request.rendering)
        reuse = PromptReuse.of(request, check, current.page_sizes)
        if isinstance(request, Respond):
            current = current.within(request.total_max)
            constrain = None  # a plain request takes no step of a task there
            if request.grammar is not None or request.tools:
                constrain = partial(_constrained, request, served, current, run, check_grammar, held)
            return await _respond(request, served, current, decode, run, vision, answer, constrain, reuse)
        return await _tokenize(request, served, current, tokenize_tokens_max, run, reuse)

    async def answer_one(call: Call[TextRequest, TextReply, TextResult]) -> None:
        try:
            with call.answering(bugs) as answer:
                answer.end(await result_of(call.request, answer))
        finally:
            free.release()

    def begin(_: TextRequest) -> Answerer[TextRequest, TextReply, TextResult] | None:
        try:
            free.acquire_nowait()
        except trio.WouldBlock:
            return None
        return answer_one

    async with trio.open_nursery() as requests, direct.answered(begin, requests):
        check = SelfCheck.of(prompt_cache, requests.start_soon, run_in_thread)
        task_status.started()
        while True:
            await free.acquire()
            requests.start_soon(answer_one, await inbox.receive())


def _present(limits: PromptLimits | None, request: TextRequest) -> PromptLimits:
    """Return the limits of a request; raises `NotReady` before the first engine is ready."""
    if limits is None or (isinstance(request, Respond) and request.total_max == 0):
        raise NotReady("no engine has been ready for this model yet")
    return limits


async def _constrained(
    request: Respond,
    model: TextModel,
    limits: PromptLimits,
    run: RunWork,
    check: GrammarCheck,
    call_grammars: CallGrammars,
    thinking: bool,
    /,
) -> tuple[Respond, Judges]:
    """Return the request with the grammar that engines get, and the judges of its choices.

    Its prompt ends within reasoning if `thinking`.
    """
    kinds, grammar = limits.info.grammars, request.grammar
    is_schema = grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    judge = Conformance(grammar.text, run, request.param).judge if grammar is not None and is_schema else None
    if (held := await call_grammars.held(request, kinds, run, thinking=thinking)) is not None:
        return await _held_to_calls(request, held, check), Judges(judge, CallConformance(held, run, request.param))
    judges = Judges(judge)
    if grammar is None:
        return request, judges
    # Such a grammar is refused with the other options, by a sentence of its own.
    if grammar.kind not in kinds:
        return request, judges
    behind = bool(request.turns) and has_marks(model.answers) and grammar.kind is not GrammarKind.STRUCTURAL_TAG
    composes = GrammarKind.STRUCTURAL_TAG in kinds
    try:
        if behind and not composes and whole_format(model.answers) is not None:
            raise Unsupported(f"the engine of this model cannot hold answers in the format {model.answers.tools}")
        if behind and composes:
            work = CHARACTER_WORK * len(grammar.text)
            engines = await run(work, partial(engine_grammar, grammar))
            begun = request.rendering.continues
            decided = grammar_behind_thought(engines, model.answers, thinking=thinking, begun=begun)
            return evolve(request, grammar=await check(decided, request.owner, decided=True)), judges
        return evolve(request, grammar=await check(grammar, request.owner)), judges
    except BadRequest as error:
        error.param = request.param("grammar")
        raise


async def _held_to_calls(request: Respond, held: HeldCalls, check: GrammarCheck) -> Respond:
    """Return the request with the grammar for its calls; raises `BadRequest` about its tools."""
    try:
        return evolve(request, grammar=await check(held.grammar, request.owner, decided=True))
    except BadRequest as error:
        raise refused_as_tools(error, request) from None


def _put(put: Callable[[TextReply, int], None], reply: TextReply) -> None:
    # Text comes first: nearly every reply is one.
    if isinstance(reply, Text):
        put(reply, reply.tokens)
    else:
        put(reply, reply.tokens if isinstance(reply, Reasoning | CallPart) else 0)


async def _respond(
    request: Respond,
    model: TextModel,
    limits: PromptLimits,
    decode: Askable[Generate, Started | Tokens, Finished],
    run: RunWork,
    vision: Vision | None,
    answer: Answer[TextReply, TextResult],
    constrain: Constrain | None,
    reuse: PromptReuse | None,
) -> Answered:
    emit: Emit = partial(_put, answer.put)
    judges, thinking = FREE, False
    if constrain is not None:
        # A bad grammar is refused before the prompt is made, which costs more.
        thinking = bool(request.turns) and model.begins_thinking(request.rendering)
        request, judges = await constrain(thinking)
    async with prepare(request, model, limits, run, vision, reuse) as prepared:
        generations = prepared.generations
        if constrain is not None and request.grammar is not None:
            thinks = model.thinks(request, generations[0][0].tokens)
            if thinks is not thinking:
                request, judges = await constrain(thinks)
                generations = [[_with_grammar(each, request.grammar) for each in choices] for choices in generations]
        emit(Accepted(prepared.prompt_tokens, prepared.reused_tokens))
        given = prepared.stops, prepared.echoes
        choices = Choices(request, model, decode, emit, *given, answer, judges, prepared.tools)
        return Answered(await choices.read(generations))


def _with_grammar(generate: Generate, grammar: Grammar | None) -> Generate:
    return evolve(generate, sampling=evolve(generate.sampling, grammar=grammar))


@frozen
class Prepared:
    """A request as the router is asked for it, and what its text needs besides."""

    # For each prompt, a list of its choices.
    generations: list[list[Generate]]
    stops: StopStrings | None
    # The text of each prompt, if the choices begin with it.
    echoes: list[str]
    # The tools, as the format of the model reads them.
    tools: ToolTable = ToolTable()
    # The tokens of the prompts that were not tokenised again.
    reused_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts together."""
        return sum(len(choices[0].tokens) for choices in self.generations)


@asynccontextmanager
async def prepare(
    request: Respond,
    model: TextModel,
    limits: PromptLimits,
    run: RunWork,
    vision: Vision | None,
    reuse: PromptReuse | None,
) -> AsyncIterator[Prepared]:
    """Yield a request's prompts as generations; the memory of its images and videos is held during the body."""
    async with AsyncExitStack() as held:
        media = media_stage(request, model.vision, vision, limits.info.media, held)
        items = () if media is None else await media.prepare()
        prompts = await encode_prompts(request, model, limits, run, items, reuse)
        kept, reused = [prompt.blocks for prompt in prompts], sum(prompt.reused for prompt in prompts)
        generations = make_generations(request, model, prompts, limits)
        # The memory of pixels is free once they are encoded, and nothing refers to them any more.
        del items, prompts
        if media is not None:
            generations = await media.encode(generations)
        if limits.page_sizes:
            generations = await with_blocks(generations, kept, limits.page_sizes, limits.info.media, run)
        tokens = [choices[0].tokens for choices in generations]
        param = request.param("turns")
        echoes = [await run(len(ids), partial(model.decode, ids, param)) for ids in tokens if request.echo]
        stop_work = STOP_CHARACTER_WORK * sum(map(len, request.stop))
        stops = await run(stop_work, partial(StopStrings, request.stop)) if request.stop else None
        yield Prepared(generations, stops, echoes, await _tool_table(request, run), reused)


async def _tool_table(request: Respond, run: RunWork) -> ToolTable:
    """Return the tools of a request as the format of its model reads them."""
    if not request.tools:
        return ToolTable()  # noqa: ASYNC910  # a plain request waits for nothing here
    work = sum(len(tool.parameters) for tool in request.tools) // JSON_CHARACTERS
    return await run(work, partial(ToolTable.of, request.tools))


async def _tokenize(
    request: Tokenize,
    model: TextModel,
    limits: PromptLimits,
    tokens_max: int,
    run: RunWork,
    reuse: PromptReuse | None,
) -> Tokenized:
    if not request.turns:
        ids = await tokenize_only(request.text, model, tokens_max, run, special=request.special, param="prompt")
        return Tokenized(ids, limits.total_max)
    try:
        encoded = await tokenize_conversation(request.turns, model, tokens_max, run, request.rendering, reuse)
    except TooManyTokens as error:
        raise too_long(str(error), tokens_max, "messages") from None
    except BadRequest as error:
        error.param = error.param or "messages"
        raise
    return Tokenized(check_count(encoded.tokens, tokens_max, "messages"), limits.total_max)
