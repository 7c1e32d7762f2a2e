"""From what a client sent to the token ids of each prompt, within the model's limits."""

from __future__ import annotations

from attrs import evolve, frozen

from actors._text.model import TextModel
from protocol.errors import BadRequest, ContextTooLong, Unsupported
from protocol.messages import EngineInfo, Generate, Respond, Role, Sampling, Turn

TURN_CHARACTERS = 32  # that a chat template puts around each turn


@frozen
class Limits:
    """What one request may have, in tokens: in all, and of prompt."""

    info: EngineInfo
    total_max: int
    prompt_max: int


def characters(request: Respond) -> int:
    """Return about how many characters there are to tokenise."""
    turns = sum(len(turn.content) + TURN_CHARACTERS for turn in request.turns)
    return turns + sum(map(len, request.texts))


def encoded(request: Respond, model: TextModel, limits: Limits) -> list[list[int]]:
    """Return the token ids of each prompt; raises `BadRequest` for one that does not fit or holds unknown ids."""
    if request.turns:
        prompts = [_conversation(request, model, limits)]
    elif request.texts:
        prompts = [model.encode_text(text) for text in request.texts]
    else:
        prompts = [list(ids) for ids in request.token_lists]
    for place, tokens in enumerate(prompts):
        which = f"prompt {place}" if len(prompts) > 1 else "the prompt"
        if not tokens:
            raise BadRequest(f"{which} is empty", param=spelled(request, "turns"))
        if request.token_lists and not 0 <= min(tokens) <= max(tokens) < limits.info.vocabulary_size:
            raise BadRequest(
                f"{which} has a token id outside 0 to {limits.info.vocabulary_size - 1}",
                param=spelled(request, "turns"),
            )
        _check_length(request, tokens, limits, which)
    return prompts


def _conversation(request: Respond, model: TextModel, limits: Limits) -> list[int]:
    tokens = model.encode(request.turns)
    if not request.truncate or _fits(request, tokens, limits):
        return tokens
    first = next((place for place, turn in enumerate(request.turns) if not _leads(turn)), len(request.turns))
    kept, rest = request.turns[:first], request.turns[first:]
    if not rest[1:]:
        return tokens  # the last turn stays whatever it takes
    # Many templates refuse a conversation that begins with an answer.
    starts = [at for at in range(1, len(rest)) if rest[at].role is Role.USER] or [len(rest) - 1]
    fewest, most = 0, len(starts) - 1
    while fewest < most:
        middle = (fewest + most) // 2
        if _fits(request, model.encode(kept + rest[starts[middle] :]), limits):
            most = middle
        else:
            fewest = middle + 1
    return model.encode(kept + rest[starts[most] :])


def _leads(turn: Turn) -> bool:
    return turn.role in {Role.SYSTEM, Role.DEVELOPER}


def _fits(request: Respond, tokens: list[int], limits: Limits) -> bool:
    return len(tokens) <= limits.prompt_max and len(tokens) + (request.tokens_max or 1) <= limits.total_max


def _check_length(request: Respond, tokens: list[int], limits: Limits, which: str) -> None:
    if len(tokens) >= limits.total_max:
        raise ContextTooLong(
            f"{which} is {len(tokens)} tokens long, and prompt and answer together can have {limits.total_max}",
            param=spelled(request, "turns"),
        )
    if len(tokens) > limits.prompt_max:
        raise ContextTooLong(
            f"{which} is {len(tokens)} tokens long, and prompts here can have {limits.prompt_max}",
            param=spelled(request, "turns"),
        )
    if request.tokens_max is not None and len(tokens) + request.tokens_max > limits.total_max:
        raise ContextTooLong(
            f"{which} is {len(tokens)} tokens long, and {request.tokens_max} more are asked for;"
            f" together they can have {limits.total_max}",
            param=spelled(request, "tokens_max"),
        )


def echoed(request: Respond, model: TextModel, prompts: list[list[int]]) -> list[str]:
    """Return what each prompt reads as; raises `BadRequest` for one with ids that read as nothing."""
    try:
        return [model.decode(tokens) for tokens in prompts]
    except BadRequest as error:
        error.param = spelled(request, "turns")
        raise


def generates(request: Respond, model: TextModel, prompts: list[list[int]], limits: Limits) -> list[list[Generate]]:
    """Return what to ask of workers, for each prompt a list of its choices.

    Raises `BadRequest` for what an engine could not take as it is.
    """
    _check_options(request, limits.info)
    choices = request.n if request.best_of is None else request.best_of
    out: list[list[Generate]] = []
    for place, tokens in enumerate(prompts):
        room = limits.total_max - len(tokens)
        sampling = _sampling(request, model, room if request.tokens_max is None else request.tokens_max)
        out.append(
            [
                Generate(
                    id=_choice_id(request.id, place * choices + choice),
                    tokens=tokens,
                    sampling=sampling if choice == 0 or request.seed is None else _reseeded(sampling, choice),
                    logprobs=_logprobs(request),
                    cache_salt=request.cache_salt,
                    priority=request.priority or 0,
                    trace=request.trace,
                    owner=request.owner,
                )
                for choice in range(choices)
            ]
        )
    return out


def _logprobs(request: Respond) -> int | None:
    """Return how many log probabilities to ask for: to tell them, or to find the likeliest choices."""
    ranked = request.best_of is not None and request.best_of > request.n
    return 0 if request.logprobs is None and ranked else request.logprobs


def _choice_id(request_id: str, choice: int) -> str:
    """Return the id of one choice, of the same length as every id; the first one has its request's."""
    return f"{request_id[:-4]}{int(request_id[-4:], 16) ^ choice:04x}" if choice else request_id


def _reseeded(sampling: Sampling, choice: int) -> Sampling:
    assert sampling.seed is not None
    return evolve(sampling, seed=sampling.seed ^ choice)  # else all choices would be the same


def _check_options(request: Respond, info: EngineInfo) -> None:
    most = info.vocabulary_size
    for name, ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", tuple(request.logit_bias))):
        if any(not 0 <= token < most for token in ids):
            raise BadRequest(f"the model's token ids end at {most - 1}", param=spelled(request, name))
    if request.grammar is not None and request.grammar.kind not in info.grammars:
        raise Unsupported(
            f"the engine of this model cannot keep an answer to a {request.grammar.kind}",
            param=spelled(request, "grammar"),
        )
    if request.logprobs is not None and request.logprobs > most:
        raise BadRequest(f"the model has {most} tokens", param=spelled(request, "logprobs"))


def _sampling(request: Respond, model: TextModel, tokens_max: int) -> Sampling:
    if request.tokens_min > tokens_max:
        raise BadRequest(
            f"at least {request.tokens_min} tokens are asked for, and at most {tokens_max}",
            param=spelled(request, "tokens_min"),
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


def spelled(request: Respond, name: str) -> str:
    """Return the client's own name of a field."""
    return request.params.get(name, name)
