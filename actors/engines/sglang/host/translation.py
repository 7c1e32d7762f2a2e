"""Translation between SGLang's objects and the project's messages: requests, log probabilities, errors, engine info."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from http import HTTPStatus
from math import prod

import numpy as np
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.dllm.config import DllmConfig
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.version import __version__

from actors.engines.request_check import check_largest_token
from actors.engines.sglang import hand_off
from actors.engines.sglang.boot_message import GRAMMAR_FAILED, GRAMMAR_TOO_SLOW
from actors.engines.sglang.host.hand_off_terms import HAND_OFF_TERMS
from actors.engines.sglang.host.outputs import Likeliest, Scored
from actors.engines.sglang.host.penalties import RESUMED_TOKENS
from protocol.errors import AskerLeft, EngineRefused, HandOffFailed, InternalError, Overloaded, RequestError
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate, GrammarKind, Logprob, PromptScores, Sampling
from protocol.messages.media import MediaInfo
from protocol.tensors import BYTES, Dtype, Tensor
from protocol.token_ids import TokenIds
from protocol.trace import UNSAMPLED, as_headers

NOT_A_NUMBER = "NaN happened"  # SGLang's reason for an end by a token outside the vocabulary
HAND_OFF_ERRORS = ("KVTransferError", "transfer failed", "bootstrap")  # marks in SGLang's errors of failed hand-offs
RESERVED_TOKENS = 6  # below either limit of a request; see SGLang's `max_req_input_len`


def sglang_request(
    request: Generate, info: EngineInfo, media: MultimodalProcessorOutput | None = None, *, traced: bool
) -> GenerateReqInput:
    """Return a request as SGLang's `GenerateReqInput`, with what has been made of its images and videos.

    A prefill gets the rank of a request twice. From the room alone SGLang 0.5.23 takes every rank but the first for the
    wrong one.
    """
    trace = request.trace
    is_rank_of_prefill = info.hand_off_address is not None and info.data_parallel > 1
    return GenerateReqInput(
        input_ids=input_ids(request.tokens, info),
        sampling_params=_sampling(request.sampling, request.resumed_tokens, honours_seed=info.honours_seed),
        image_data=None if media is None else [media],
        rid=request.id,
        stream=True,
        return_logprob=request.logprobs is not None,
        top_logprobs_num=request.logprobs or 0,
        # From here on SGLang takes nothing from its prefix cache, which has no log probabilities.
        logprob_start_len=0 if request.prompt_logprobs else None,
        cache_salt=request.cache_namespace,
        lora_path=None if request.adapter is None else request.adapter.name,
        priority=request.priority,
        routed_dp_rank=request.rank,
        disagg_prefill_dp_rank=request.rank if is_rank_of_prefill else None,
        external_trace_header=(UNSAMPLED if trace is None else as_headers(trace)) if traced else None,
        **_bootstrap(request.hand_off),
    )


def input_ids(tokens: TokenIds, info: EngineInfo) -> array[int]:
    """Return token ids as SGLang keeps them; raises `BadRequest` for one outside the vocabulary."""
    ids = np.frombuffer(tokens.packed, "<u4")
    check_largest_token(int(ids.max()), info)
    return array("q", ids.astype("<i8").tobytes())


def _sampling(wanted: Sampling, resumed: int, *, honours_seed: bool) -> dict[str, object]:
    return {
        "max_new_tokens": wanted.tokens_max,
        "min_new_tokens": wanted.tokens_min,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "top_k": wanted.top_k,
        "min_p": wanted.min_p,
        "frequency_penalty": wanted.frequency_penalty,
        "presence_penalty": wanted.presence_penalty,
        "repetition_penalty": wanted.repetition_penalty,
        "stop_token_ids": list(wanted.stop_token_ids) or None,
        # The end of a grammar ends the answer; where it is ignored, SGLang ends it one token later, which may be any.
        "ignore_eos": wanted.ignore_eos and wanted.grammar is None,
        "sampling_seed": wanted.seed if honours_seed else None,
        "logit_bias": {str(token): bias for token, bias in wanted.logit_bias.items()} or None,
        "custom_params": {RESUMED_TOKENS: resumed} if resumed and wanted.penalised else None,
        # SGLang has a field of this name for each kind of grammar
        **({} if wanted.grammar is None else {wanted.grammar.kind.value: wanted.grammar.text}),
    }


def _bootstrap(data: bytes) -> dict[str, object]:
    """Return the arguments by which a decode finds its prefill; raises `HandOffFailed` for bytes that name none."""
    if not data:
        return {}
    rendezvous = hand_off.Rendezvous.decode(data)
    return {
        "bootstrap_host": rendezvous.url_host,
        "bootstrap_port": rendezvous.port,
        "bootstrap_room": rendezvous.room,
    }


def logprobs(found: Likeliest | None, top: int) -> tuple[Logprob, ...]:
    """Return the log probabilities of the tokens that a request got in a step, with the `top` likeliest of each."""
    if found is None:
        return ()
    if not top:
        return tuple(map(Logprob, found.values))
    tops = zip(found.top_ids, found.top_values, strict=True)
    likeliest = (tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in tops)
    return tuple(map(Logprob, found.values, likeliest))


def scores(found: Scored, rows: int) -> PromptScores:
    """Return the first `rows` of a prompt's scores; the rest are those of resumed tokens."""
    likeliest = found.likeliest

    def tensor(dtype: Dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
        return Tensor(dtype, shape, memoryview(data)[: prod(shape) * BYTES[dtype]])

    return PromptScores(
        tensor(Dtype.FLOAT32, (rows,), found.logprobs),
        tensor(Dtype.INT32, (rows, likeliest), found.top_ids),
        tensor(Dtype.FLOAT32, (rows, likeliest), found.top_logprobs),
    )


def is_failure(reason: Mapping[str, object]) -> bool:
    """Return whether SGLang's finish reason is that of a broken answer; its last tokens may be anything."""
    return reason["type"] == "abort" or reason.get("matched") == NOT_A_NUMBER


def abort_error(reason: Mapping[str, object]) -> RequestError:
    """Return the error of a request that SGLang's scheduler has not answered whole, from its finish reason."""
    if reason.get("matched") == NOT_A_NUMBER:  # SGLang calls it a stop
        return InternalError("the model's scores were no numbers, so that no token could be drawn")
    status, detail = reason.get("status_code"), str(reason.get("message") or "aborted")
    if not isinstance(status, int):  # no error: the asker left
        return AskerLeft(detail)
    if status < HTTPStatus.INTERNAL_SERVER_ERROR or GRAMMAR_TOO_SLOW in detail:
        return EngineRefused(detail)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return Overloaded(detail)
    if detail.startswith(GRAMMAR_FAILED):  # this request alone is at fault, and not the engine
        return EngineRefused("no token is left that the grammar and the request's other options allow")
    return HandOffFailed(detail) if any(word in detail for word in HAND_OFF_ERRORS) else InternalError(detail)


def honours_seed(engine: Engine) -> bool:
    """Whether a request's seed decides its tokens."""
    return bool(engine.server_args.enable_deterministic_inference)


def engine_info(
    engine: Engine, digest: tuple[tuple[str, str], ...], media: MediaInfo | None = None, *, sequential: bool = False
) -> EngineInfo:
    """Return the properties and limits of an engine; `digest` is of its model's folder."""
    arguments, manager = engine.server_args, engine.tokenizer_manager
    scheduler = engine._scheduler_init_result.scheduler_infos[0]  # noqa: SLF001
    context_max, kv_tokens_max = manager.context_len, scheduler["max_total_num_tokens"]
    page_size = resolved_view(arguments).page_size  # a diffusion model's is its block
    mode = arguments.disaggregation_mode
    diffusion = DllmConfig.from_server_args(arguments)
    block = 0 if diffusion is None else diffusion.block_size
    reserve = arguments.num_reserved_decode_tokens if mode == "decode" else 0
    return EngineInfo(
        kind="sglang",
        version=__version__,
        vocabulary_size=manager.model_config.vocab_size,
        context_max=context_max,
        kv_tokens_max=kv_tokens_max,
        # SGLang refuses a prompt that reaches into the last `RESERVED_TOKENS` of either limit. Of KV memory it keeps a
        # page and a token for itself, and a prompt takes whole pages; an answer that would exceed what is left it
        # truncates without an error, to nothing if need be (`max_new_tokens_for_memory`). A decode takes no prompt that
        # leaves less than its reserve, and lets it wait for ever; it takes a retracted request back, prompt and answer
        # so far, by the same rule (`_prealloc_required_tokens`).
        request_tokens_max=min(
            context_max - RESERVED_TOKENS,
            kv_tokens_max - max(2 * page_size, RESERVED_TOKENS) - reserve,
        )
        - block,
        running_max=arguments.max_running_requests,
        page_size=page_size,
        honours_seed=honours_seed(engine),
        # A request with a grammar for a diffusion model never ends.
        grammars=() if block or arguments.grammar_backend == "none" else tuple(GrammarKind),
        hand_off=HandOff.NONE if mode == "null" else HandOff.SEQUENTIAL if sequential else HandOff.CONCURRENT,
        hand_off_address=hand_off.address(arguments.host, arguments.disaggregation_bootstrap_port)
        if mode == "prefill"
        else None,
        ranks=arguments.tp_size * arguments.pp_size * arguments.dp_size,
        digest=digest,
        media=media,
        metrics=arguments.enable_metrics,
        data_parallel=arguments.dp_size,
        computes_ahead=not arguments.disable_overlap_schedule,
        hand_off_terms=() if mode == "null" else _hand_off_terms(engine),
        diffusion_block=block,
    )


def _hand_off_terms(engine: Engine) -> tuple[tuple[str, str], ...]:
    """Return what a decode of SGLang compares with its prefill at their first meeting, to end if it differs.

    What the schedulers have not reported is left out.
    """
    arguments = engine.server_args
    reported = engine._scheduler_init_result.scheduler_infos[0].get(HAND_OFF_TERMS, {})  # noqa: SLF001
    own = {"device": arguments.device, "transfer": arguments.disaggregation_transfer_backend}
    return tuple({**own, **reported}.items())
