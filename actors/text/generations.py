"""The generations of a client's request: what the router is asked for, one for each choice of each prompt."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from actors.text.limits import PromptLimits
from actors.text.model import Defaults, TextModel
from actors.text.prompts import Prompt
from protocol.cost import check_scores
from protocol.errors import BadRequest, Unsupported
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate, RoutingHints, Sampling
from protocol.messages.text import Respond

LIKELIEST = Defaults(temperature=0.0)
"""The defaults for a diffusion model, whatever its authors recommend: it draws nothing."""


def make_generations(
    request: Respond, model: TextModel, prompts: Sequence[Prompt], limits: PromptLimits
) -> list[list[Generate]]:
    """Return the generations to ask for: for each prompt, a list of its choices.

    Raises `BadRequest` for options that an engine could not take.
    """
    _check_options(request, limits.info)
    if request.thinking_token_budget is not None and (model.answers.reasoning is None or not request.turns):
        sentence = "this answer has no reasoning in a known format, which a budget could end"
        raise Unsupported(sentence, param=request.param("thinking_token_budget"))
    choices = request.n if request.best_of is None else request.best_of
    out: list[list[Generate]] = []
    hints = _hints(request)
    for index, prompt in enumerate(prompts):
        if request.scores_prompts:
            check_scores(len(prompt.tokens), request.logprobs or 0, request.param("logprobs"))
        room = limits.total_max - len(prompt.tokens)
        own = LIKELIEST if limits.info.diffusion_block else model.defaults
        sampling = _sampling(request, own, room if request.tokens_max is None else request.tokens_max)
        if limits.info.diffusion_block and (name := sampling.draws) is not None:
            sentence = "this model is a diffusion model, which takes the likeliest tokens"
            param = request.param(name)
            raise Unsupported(f"{sentence}: leave out {param}", param=param)
        out.append(
            [
                Generate(
                    id=_choice_id(request.id, index * choices + choice),
                    tokens=prompt.tokens,
                    sampling=sampling if choice == 0 or request.seed is None else _reseeded(sampling, choice),
                    logprobs=_logprobs(request),
                    # All choices of a prompt have the same ones, and the others find it in the prefix cache.
                    prompt_logprobs=request.scores_prompts and choice == 0,
                    cache_salt=request.cache_salt,
                    adapter=request.adapter,
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
    """Return the number of likeliest tokens to ask for: the client's, or 0 where scores rank the choices."""
    ranked = request.best_of is not None and request.best_of > request.n
    return 0 if request.logprobs is None and ranked else request.logprobs


def _hints(request: Respond) -> RoutingHints | None:
    """Return the hints for the router of a request, None if there are none."""
    hints = RoutingHints(request.session, ttft_target_ms=request.ttft_target_ms, itl_target_ms=request.itl_target_ms)
    return None if hints == RoutingHints() else hints


def _choice_id(request_id: str, choice: int) -> str:
    """Return the id of one choice, as long as every id; the first choice has that of the request."""
    return f"{request_id[:-4]}{int(request_id[-4:], 16) ^ choice:04x}" if choice else request_id


def _reseeded(sampling: Sampling, choice: int) -> Sampling:
    assert sampling.seed is not None
    # With one seed, all choices would be the same.
    return evolve(sampling, seed=sampling.seed ^ choice)


def _check_options(request: Respond, info: EngineInfo) -> None:
    vocabulary_size = info.vocabulary_size
    for name, ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", tuple(request.logit_bias))):
        if any(not 0 <= token < vocabulary_size for token in ids):
            raise BadRequest(f"the model's token ids end at {vocabulary_size - 1}", param=request.param(name))
    if request.grammar is not None and request.grammar.kind not in info.grammars:
        raise Unsupported(
            f"the engine of this model cannot keep an answer to a {request.grammar.kind}",
            param=request.param("grammar"),
        )
    if info.diffusion_block and _logprobs(request) is not None:
        name = "best_of" if request.logprobs is None else "logprobs"
        raise Unsupported("this model is a diffusion model, which has no log probabilities", param=request.param(name))
    if request.thinking_token_budget is not None and request.grammar is not None:
        sentence = "the grammar of an answer would begin anew behind the budget of its reasoning; send one of them"
        raise Unsupported(sentence, param=request.param("thinking_token_budget"))
    if request.logprobs is not None and request.logprobs > vocabulary_size:
        raise BadRequest(f"the model has {vocabulary_size} tokens", param=request.param("logprobs"))


def _sampling(request: Respond, own: Defaults, tokens_max: int) -> Sampling:
    if request.tokens_min > tokens_max:
        raise BadRequest(
            f"at least {request.tokens_min} tokens are asked for, and at most {tokens_max}",
            param=request.param("tokens_min"),
        )
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
