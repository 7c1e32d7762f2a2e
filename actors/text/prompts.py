"""The token ids of each prompt of a client's request, and the generations to ask for, within the limits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice

import trio
from attrs import evolve, frozen

from actors.kit.offload import Offload
from actors.media.placeholders import expand
from actors.text.encoding import TooManyTokens, tokenize_conversation, tokenize_text
from actors.text.model import TextModel
from protocol.errors import BadRequest, ContextTooLong, Unsupported
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate, RoutingHints, Sampling
from protocol.messages.media import MediaItem
from protocol.messages.text import Respond, Role, Turn


@frozen
class PromptLimits:
    """The limits of one request, in tokens: of prompt and answer together, and of the prompt alone."""

    info: EngineInfo
    total_max: int
    prompt_max: int
    page_sizes: tuple[int, ...] = ()  # of the engines, if prompts are routed by what those have in their caches

    @property
    def tokens_max(self) -> int:
        """The most tokens of a prompt: at least one of the total is the answer's."""
        return min(self.prompt_max, self.total_max - 1)

    def within(self, total_max: int | None) -> PromptLimits:
        """Return the limits of a request that was admitted with `total_max` tokens in all; None for any number."""
        if total_max is None or total_max >= self.total_max:
            return self
        return evolve(self, total_max=total_max, prompt_max=min(self.prompt_max, total_max))


@frozen
class Prompt:
    """The token ids of one prompt, with as many placeholders for each image or video as it has tokens."""

    tokens: list[int]
    media: tuple[MediaItem, ...] = ()


async def encode_prompts(
    request: Respond, model: TextModel, limits: PromptLimits, work: Offload, media: tuple[MediaItem, ...] = ()
) -> list[Prompt]:
    """Return each prompt; `media` are the items of all turns.

    Raises `BadRequest` for a prompt that does not fit, has unknown ids, or has no place for an item.
    """
    await trio.lowlevel.checkpoint()
    prompts: list[Prompt] = []
    count = 1 if request.turns else len(request.texts) or len(request.token_lists)
    for place in range(count):
        which = f"prompt {place}" if count > 1 else "the prompt"
        try:
            prompt = await _prompt(request, place, model, limits, work, media)
        except TooManyTokens as error:
            raise _too_long(request, limits, which, str(error)) from None
        if not prompt.tokens:
            raise BadRequest(f"{which} is empty", param=param_name(request, "turns"))
        _check_length(request, len(prompt.tokens), limits, which)
        prompts.append(prompt)
    return prompts


async def _prompt(
    request: Respond, place: int, model: TextModel, limits: PromptLimits, work: Offload, media: tuple[MediaItem, ...]
) -> Prompt:
    if request.turns:
        return await _conversation(request, model, limits, work, media)
    if request.texts:
        tokens = await tokenize_text(request.texts[place], model, limits.tokens_max, work)
    else:
        ids = request.token_lists[place]
        if len(ids) > limits.tokens_max:
            raise TooManyTokens(str(len(ids)))
        tokens = await work.run(len(ids), lambda: _checked(request, place, limits))
    return Prompt(_expanded(request, tokens, (), model))


def _expanded(request: Respond, tokens: list[int], media: tuple[MediaItem, ...], model: TextModel) -> list[int]:
    try:
        return expand(tokens, media, model.vision)
    except BadRequest as error:
        error.param = param_name(request, "turns")
        raise


def _checked(request: Respond, place: int, limits: PromptLimits) -> list[int]:
    """Return the token ids of a prompt that was sent as token ids; raises `BadRequest` for unknown ones."""
    tokens, last = list(request.token_lists[place]), limits.info.vocabulary_size - 1
    if tokens and not 0 <= min(tokens) <= max(tokens) <= last:
        which = f"prompt {place}" if request.token_lists[1:] else "the prompt"
        raise BadRequest(f"{which} has a token id outside 0 to {last}", param=param_name(request, "turns"))
    return tokens


async def _conversation(
    request: Respond, model: TextModel, limits: PromptLimits, work: Offload, media: tuple[MediaItem, ...]
) -> Prompt:
    """Return the prompt of a conversation; if it may be truncated, without the oldest turns that do not fit.

    Raises `TooManyTokens` for one that certainly does not fit.
    """
    await trio.lowlevel.checkpoint()
    items = _items_of_turns(request.turns, media)
    if not request.truncate:
        return await _turns_prompt(request, request.turns, items, model, limits, work)
    begin = next((place for place, turn in enumerate(request.turns) if not _leads(turn)), len(request.turns))
    kept, rest = request.turns[:begin], request.turns[begin:]

    async def read(first: int) -> Prompt:
        items_left = items[:begin] + items[begin + first :]
        return await _turns_prompt(request, kept + rest[first:], items_left, model, limits, work)

    async def fitting(first: int) -> Prompt | None:
        await trio.lowlevel.checkpoint()
        try:
            prompt = await read(first)
        except TooManyTokens:
            return None
        return prompt if _fits(request, prompt.tokens, limits) else None

    # Many templates refuse a conversation that begins with an answer. The last turn is kept in any case.
    questions = [start for start in range(1, len(rest)) if rest[start].role is Role.USER]
    starts = [0, *(questions or range(len(rest))[1:][-1:])]
    low, high, place = 0, len(starts) - 1, 0  # a binary search, the whole first: it nearly always fits
    best: Prompt | None = None
    while low < high:
        if (prompt := await fitting(starts[place])) is not None:
            high, best = place, prompt
        else:
            low = place + 1
        place = (low + high) // 2
    return await read(starts[high]) if best is None else best


async def _turns_prompt(
    request: Respond,
    turns: tuple[Turn, ...],
    items: Sequence[tuple[MediaItem, ...]],
    model: TextModel,
    limits: PromptLimits,
    work: Offload,
) -> Prompt:
    tokens = await tokenize_conversation(turns, model, limits.tokens_max, work)
    media = tuple(chain.from_iterable(items))
    return Prompt(_expanded(request, tokens, media, model), media)


def _items_of_turns(turns: Sequence[Turn], media: tuple[MediaItem, ...]) -> list[tuple[MediaItem, ...]]:
    """Return the items of each turn; `media` are those of all turns."""
    items = iter(media)
    return [tuple(islice(items, len(turn.media))) if media else () for turn in turns]


def _leads(turn: Turn) -> bool:
    return turn.role in {Role.SYSTEM, Role.DEVELOPER}


def _fits(request: Respond, tokens: list[int], limits: PromptLimits) -> bool:
    return len(tokens) <= limits.prompt_max and len(tokens) + (request.tokens_max or 1) <= limits.total_max


def _check_length(request: Respond, length: int, limits: PromptLimits, which: str) -> None:
    if length > limits.tokens_max:
        raise _too_long(request, limits, which, str(length))
    if request.tokens_max is not None and length + request.tokens_max > limits.total_max:
        raise ContextTooLong(
            f"{which} is {length} tokens long, and {request.tokens_max} more are asked for;"
            f" together they can have {limits.total_max}",
            param=param_name(request, "tokens_max"),
        )


def _too_long(request: Respond, limits: PromptLimits, which: str, length: str) -> ContextTooLong:
    together = f"prompt and answer together can have {limits.total_max}"
    alone = f"prompts here can have {limits.prompt_max}"
    limit = together if limits.total_max <= limits.prompt_max else alone
    return ContextTooLong(f"{which} is {length} tokens long, and {limit}", param=param_name(request, "turns"))


async def echo_texts(request: Respond, model: TextModel, prompts: Sequence[Sequence[int]], work: Offload) -> list[str]:
    """Return the text of each prompt, given as token ids; raises `BadRequest` for one with unknown ids."""
    try:
        await trio.lowlevel.checkpoint()
        return [await work.run(len(prompt), partial(model.decode, prompt)) for prompt in prompts]
    except BadRequest as error:
        error.param = param_name(request, "turns")
        raise


def make_generations(
    request: Respond, model: TextModel, prompts: Sequence[Prompt], limits: PromptLimits
) -> list[list[Generate]]:
    """Return the generations to ask for: for each prompt, a list of its choices.

    Raises `BadRequest` for options that an engine could not take.
    """
    _check_options(request, limits.info)
    choices = request.n if request.best_of is None else request.best_of
    out: list[list[Generate]] = []
    hints = _hints(request)
    for place, prompt in enumerate(prompts):
        room = limits.total_max - len(prompt.tokens)
        sampling = _sampling(request, model, room if request.tokens_max is None else request.tokens_max)
        out.append(
            [
                Generate(
                    id=_choice_id(request.id, place * choices + choice),
                    tokens=prompt.tokens,
                    sampling=sampling if choice == 0 or request.seed is None else _reseeded(sampling, choice),
                    logprobs=_logprobs(request),
                    cache_salt=request.cache_salt,
                    priority=request.priority or 0,
                    trace=request.trace,
                    owner=request.owner,
                    media=prompt.media,
                    hints=hints,
                )
                for choice in range(choices)
            ]
        )
    return out


def _logprobs(request: Respond) -> int | None:
    """Return how many log probabilities to ask for: those that the client wants, or those that rank the choices."""
    ranked = request.best_of is not None and request.best_of > request.n
    return 0 if request.logprobs is None and ranked else request.logprobs


def _hints(request: Respond) -> RoutingHints | None:
    """Return the hints for the router of a request, None if there is nothing that it should know."""
    hints = RoutingHints(request.session, ttft_target_ms=request.ttft_target_ms, itl_target_ms=request.itl_target_ms)
    return None if hints == RoutingHints() else hints


def _choice_id(request_id: str, choice: int) -> str:
    """Return the id of one choice, as long as every id; the first choice has that of the request."""
    return f"{request_id[:-4]}{int(request_id[-4:], 16) ^ choice:04x}" if choice else request_id


def _reseeded(sampling: Sampling, choice: int) -> Sampling:
    assert sampling.seed is not None
    return evolve(sampling, seed=sampling.seed ^ choice)  # else all choices would be the same


def _check_options(request: Respond, info: EngineInfo) -> None:
    vocabulary_size = info.vocabulary_size
    for name, ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", tuple(request.logit_bias))):
        if any(not 0 <= token < vocabulary_size for token in ids):
            raise BadRequest(f"the model's token ids end at {vocabulary_size - 1}", param=param_name(request, name))
    if request.grammar is not None and request.grammar.kind not in info.grammars:
        raise Unsupported(
            f"the engine of this model cannot keep an answer to a {request.grammar.kind}",
            param=param_name(request, "grammar"),
        )
    if request.logprobs is not None and request.logprobs > vocabulary_size:
        raise BadRequest(f"the model has {vocabulary_size} tokens", param=param_name(request, "logprobs"))


def _sampling(request: Respond, model: TextModel, tokens_max: int) -> Sampling:
    if request.tokens_min > tokens_max:
        raise BadRequest(
            f"at least {request.tokens_min} tokens are asked for, and at most {tokens_max}",
            param=param_name(request, "tokens_min"),
        )
    own = model.defaults
    return Sampling(
        tokens_max=1 if request.warm_up else tokens_max,
        tokens_min=0 if request.warm_up else request.tokens_min,
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
        logit_bias=request.logit_bias,
        grammar=request.grammar,
    )


def param_name(request: Respond, name: str) -> str:
    """Return the client's name of a field."""
    return request.params.get(name, name)
