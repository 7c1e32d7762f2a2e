"""The check of a request before any kind of engine gets it: refuses what would crash an engine, or be changed by it."""

from __future__ import annotations

from math import isfinite

from actors.engines.adapter_table import not_loaded
from actors.engines.media_check import check_media
from protocol.cost import check_scores
from protocol.errors import AdapterNotLoaded, BadRequest, ContextTooLong, HandOffFailed, Unsupported
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import HAND_OFF_BYTES_MAX, Generate
from protocol.messages.kind import Message
from protocol.messages.leaving import LeavingRequest, RunningRequests
from protocol.messages.operation import EngineOperation
from protocol.messages.operations import OPERATION_OF


def check_request(request: Generate, info: EngineInfo) -> None:
    """Raise `BadRequest` for a request that an engine would crash on or change, `ContextTooLong` for a long one.

    Raises `HandOffFailed` for a leg of a pair asked like an engine of both legs, and the reverse.
    """
    _check_tokens(request, info.vocabulary_size)
    check_rank(request, info.data_parallel)
    if request.adapter is not None and request.adapter not in info.adapters:
        raise AdapterNotLoaded(
            not_loaded(request.adapter.name, (adapter.name for adapter in info.adapters)), param="model"
        )
    wanted = request.sampling
    if not all(map(isfinite, wanted.logit_bias.values())):
        raise BadRequest("a logit_bias is not a finite number", param="logit_bias")
    if not 0 <= (request.logprobs or 0) <= info.vocabulary_size:
        raise BadRequest(f"the model has {info.vocabulary_size} tokens", param="logprobs")
    _check_prompt_logprobs(request, info)
    if wanted.grammar is not None and wanted.grammar.kind not in info.grammars:
        raise Unsupported(f"this engine cannot keep an answer to a {wanted.grammar.kind}", param="grammar")
    if info.diffusion_block:
        _check_diffusion(request)
    _check_hand_off(request.hand_off, info)
    if wanted.tokens_max < 1:
        raise BadRequest("an answer has at least one token", param="tokens_max")
    if not 0 <= wanted.tokens_min <= wanted.tokens_max:
        raise BadRequest(f"tokens_min must be from 0 to {wanted.tokens_max}", param="tokens_min")
    if wanted.tokens_min and wanted.grammar is not None:  # where a grammar allows only the end, no token would be left
        raise BadRequest("an answer that keeps to a grammar has no least length", param="tokens_min")
    total = len(request.tokens) + wanted.tokens_max
    if total > info.request_tokens_max:
        raise ContextTooLong(
            f"the prompt's {len(request.tokens)} tokens and the {wanted.tokens_max} asked for make {total};"
            f" this engine holds {info.request_tokens_max}"
        )
    check_media(request, info)


def _check_diffusion(request: Generate) -> None:
    """Raise `Unsupported` for what a diffusion model would ignore."""
    if request.logprobs is not None:
        raise Unsupported("a diffusion model has no log probabilities", param="logprobs")
    if (name := request.sampling.draws) is not None:
        raise Unsupported("a diffusion model takes the likeliest tokens, and would ignore it", param=name)


def check_largest_token(token: int, info: EngineInfo) -> None:
    """Raise `BadRequest` for a prompt whose largest token id is none of the vocabulary: an engine crashes on it.

    `check_request` looks at no token of a prompt, since the process of an engine finds the largest one sooner.
    """
    if token >= info.vocabulary_size:
        raise BadRequest(f"the prompt has a token id outside 0 to {info.vocabulary_size - 1}")


def check_operation(request: Message, info: EngineInfo) -> EngineOperation:
    """Return the row of an operation; raises `Unsupported` if the engine does not list it, or cannot hold requests."""
    operation = OPERATION_OF[type(request)]
    if operation.name not in info.operations:
        raise Unsupported(operation.unlisted)
    if operation.renews:
        raise Unsupported(f"{operation.name} is carried out by the engine's node")
    holds = isinstance(request, LeavingRequest) and request.running is RunningRequests.HOLD
    if holds and info.diffusion_block:  # put back in the middle of a block, a request ends SGLang's scheduler
        raise Unsupported("a diffusion model holds no requests: drain or end them", param="running")
    if holds and info.hand_off is not HandOff.NONE:  # the other leg would wait in vain
        raise Unsupported("a prefill or decode holds no requests: drain or end them", param="running")
    return operation


def _check_hand_off(hand_off: bytes, info: EngineInfo) -> None:
    """Raise `HandOffFailed` for a hand-off that the engine's leg cannot take: no client chose it."""
    if bool(hand_off) is not (info.is_decode or info.hand_off is HandOff.CONCURRENT):
        raise HandOffFailed(
            "a decode wants a hand-off, and so does a prefill that meets it; an engine that computes both takes none"
        )
    if len(hand_off) > HAND_OFF_BYTES_MAX:
        raise HandOffFailed(f"a hand-off has at most {HAND_OFF_BYTES_MAX} bytes, got {len(hand_off)}")


def _check_prompt_logprobs(request: Generate, info: EngineInfo) -> None:
    """Raise `BadRequest` for a prompt whose log probabilities the engine cannot compute."""
    if not request.prompt_logprobs:
        return
    if info.is_decode:
        raise Unsupported("a decode computes no prompt", param="prompt_logprobs")
    if request.logprobs is None:
        raise BadRequest("those of a prompt come beside those of the answer only", param="prompt_logprobs")
    check_scores(len(request.tokens), request.logprobs, "logprobs")


def check_rank(request: Generate, ranks: int) -> None:
    """Raise `BadRequest` for a request to a rank that the engine does not have."""
    if not 0 <= request.rank < ranks:
        raise BadRequest(f"rank must be from 0 to {ranks - 1}, got {request.rank}", param="rank")


def _check_tokens(request: Generate, vocabulary_size: int) -> None:
    wanted, last = request.sampling, vocabulary_size - 1
    if not request.tokens:
        raise BadRequest("the prompt is empty")
    if not 0 <= request.resumed_tokens < len(request.tokens):
        words = f"resumed_tokens must be from 0 to {len(request.tokens) - 1}, got {request.resumed_tokens}"
        raise BadRequest(words, param="resumed_tokens")
    if any(not 0 <= token <= last for token in wanted.stop_token_ids):
        raise BadRequest(f"a stop token id is outside 0 to {last}", param="stop_token_ids")
    if any(not 0 <= token <= last for token in wanted.logit_bias):
        raise BadRequest(f"logit_bias names a token id outside 0 to {last}", param="logit_bias")
