"""A request as the arguments of TensorRT-LLM: dictionaries of plain values, from which the host makes its objects.

Each field of `Generate` and `Sampling` is passed on, or refused by its name. TensorRT-LLM's own defaults are not the
project's, so these traps are kept in mind here:

- Without a temperature, a `top_k` and a `top_p` it takes the likeliest token; version 1.0 does so without a `top_p`
  alone. So the first and the last are always given. A temperature of 0 is no number to it in all versions, while a
  `top_k` of 1 is greedy in each.
- `ignore_eos` drops the stop tokens as well. To ignore the end, an answer gets an end token that does not exist.
- `min_tokens` holds back the end token alone, and with one that does not exist the last token of the vocabulary.
- A stop token is cut off, unless stop strings are to be included.
- All requests without a seed have the same one.
- The penalties for frequency and presence count the prompt, unless they are told to ignore it.
- For the prompt's log probabilities, its cached blocks have no scores, so nothing may be found in the cache.
"""

from __future__ import annotations

from zlib import crc32

from attrs import frozen

from actors.engines.request_check import check_largest_token
from actors.engines.trtllm.handed import ALONE
from actors.engines.trtllm.signatures import GENERATE, SAMPLING, SCHEDULING, Signatures
from protocol.errors import BadRequest, Unsupported
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate, Grammar, GrammarKind, Sampling
from protocol.trace import as_headers

NO_END = -1
"""The end token of an answer whose end is ignored: no token has this id."""

SEEDS = 2**64  # TensorRT-LLM's seeds are unsigned
NEUTRAL_PRIORITY = 0.5
SCORES_SALT = "scores:"
"""The beginning of the cache salt of a request for its prompt's log probabilities, which no other request has."""

GUIDES = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}
"""The field of `GuidedDecodingParams` of each kind of grammar."""


@frozen
class EngineRequest:
    """The arguments of one request, by the fields of `SamplingParams`, `GuidedDecodingParams` and `SchedulingParams`.

    `call` has the plain values for `generate_async`. None: the request has no such object.
    """

    sampling: dict[str, object]
    call: dict[str, object]
    guided: dict[str, str] | None = None
    scheduling: dict[str, object] | None = None


def check(request: Generate, info: EngineInfo) -> None:
    """Raise `Unsupported` for a field that the engine's version cannot honour, by its name.

    Beside `check_request`, which knows no kind.
    """
    signatures, wanted = Signatures.of(info.version), request.sampling
    lacks = f"TensorRT-LLM {info.version}"
    if not 0 < wanted.top_p <= 1:
        raise BadRequest("top_p must be above 0 and at most 1", param="top_p")
    if (wanted.frequency_penalty or wanted.presence_penalty) and not signatures.has(SAMPLING, "prompt_ignore_length"):
        name = "frequency_penalty" if wanted.frequency_penalty else "presence_penalty"
        raise Unsupported(f"{lacks} penalises the tokens of the prompt, too", param=name)
    if request.prompt_logprobs and not signatures.has(SAMPLING, "prompt_logprobs_simple_format"):
        raise Unsupported(f"{lacks} gives none for a prompt's own tokens", param="echo")
    if request.cache_namespace is not None and not signatures.has(GENERATE, "cache_salt"):
        param = "model" if request.cache_salt is None else "cache_salt"  # an adapter is named by the model
        raise Unsupported(f"{lacks} cannot keep cached prompts apart", param=param)
    if info.data_parallel > 1 and not signatures.holds(SCHEDULING):
        raise Unsupported(f"{lacks} cannot be given a rank", param="rank")
    if request.media and info.is_decode and request.hand_off == ALONE:
        raise Unsupported("a decode without a partner computes no images", param="media")


def engine_request(request: Generate, info: EngineInfo, ends: tuple[int, ...]) -> EngineRequest:
    """Return the arguments of a request for an engine of this kind; `ends` are the model's end-of-sequence tokens.

    The hand-off has functions of its own, in `handed.py`.
    """
    check(request, info)
    tokens = request.tokens.tolist()
    check_largest_token(max(tokens), info)
    signatures = Signatures.of(info.version)
    grammar = request.sampling.grammar
    by_rank = info.data_parallel > 1
    return EngineRequest(
        sampling=_sampling(request, info, ends),
        call={
            "inputs": tokens,
            "streaming": not info.returns_states,
            **_salt(request),
            **_optional(request, signatures),
        },
        guided=None if grammar is None else _guide(grammar),
        scheduling={"attention_dp_rank": request.rank, "attention_dp_relax": False} if by_rank else None,
    )


def priority(number: int) -> float:
    """Return a priority as TensorRT-LLM has it, from 0 to 1: the order of integers is kept."""
    return NEUTRAL_PRIORITY * (1 + number / (1 + abs(number)))


def _sampling(request: Generate, info: EngineInfo, ends: tuple[int, ...]) -> dict[str, object]:
    wanted = request.sampling
    # The end of a grammar ends the answer, as for SGLang.
    ends = () if wanted.ignore_eos and wanted.grammar is None else ends
    stops = [*dict.fromkeys((*wanted.stop_token_ids, *ends[1:]))]
    fields: dict[str, object] = {
        "max_tokens": 1 if info.returns_states else wanted.tokens_max,
        "end_id": ends[0] if ends else NO_END,
        "pad_id": 0,
        "seed": _seed(request),
        "top_p": wanted.top_p,
        "detokenize": False,
        "include_stop_str_in_output": True,
        **({"temperature": wanted.temperature} if wanted.temperature else {"temperature": 1.0, "top_k": 1}),
    }
    if stops:
        fields["stop_token_ids"] = stops
    if wanted.top_k > 0 and wanted.temperature:
        fields["top_k"] = wanted.top_k
    fields.update({name: value for name, value in _penalties(wanted).items() if value})
    if wanted.frequency_penalty or wanted.presence_penalty:
        fields["prompt_ignore_length"] = len(request.tokens) - request.resumed_tokens
    if request.logprobs is not None:
        fields["logprobs"] = max(1, request.logprobs)  # with 0 some versions give none, not even that of the drawn one
    if request.prompt_logprobs:
        fields["prompt_logprobs"] = max(1, request.logprobs or 0)
    if wanted.logit_bias:
        fields["embedding_bias"] = _bias(wanted, info.vocabulary_size)
    if wanted.tokens_min and (stops or ends):
        if stops:
            raise Unsupported("TensorRT-LLM holds back one end token, and no other stop token", param="min_tokens")
        fields["min_tokens"] = min(1, wanted.tokens_min) if info.returns_states else wanted.tokens_min
    return fields


def _penalties(wanted: Sampling) -> dict[str, float]:
    """Return the fields whose neutral value is 0, and the repetition penalty as 0 if it is neutral."""
    return {
        "min_p": wanted.min_p,
        "frequency_penalty": wanted.frequency_penalty,
        "presence_penalty": wanted.presence_penalty,
        "repetition_penalty": 0.0 if wanted.repetition_penalty == 1 else wanted.repetition_penalty,
    }


def _seed(request: Generate) -> int:
    """Return the seed of a request: of its id, if it has none of its own."""
    seed = request.sampling.seed
    return crc32(request.id.encode()) if seed is None else seed % SEEDS


def _bias(wanted: Sampling, vocabulary_size: int) -> list[float]:
    bias = [0.0] * vocabulary_size
    for token, value in wanted.logit_bias.items():
        bias[token] = value
    return bias


def _guide(grammar: Grammar) -> dict[str, str]:
    return {GUIDES[grammar.kind]: grammar.text}


def _salt(request: Generate) -> dict[str, object]:
    """Return the cache salt of a request, if it needs one."""
    salt = request.cache_namespace
    if request.prompt_logprobs:
        salt = f"{SCORES_SALT}{request.id}"
    return {} if salt is None else {"cache_salt": salt}


def _optional(request: Generate, signatures: Signatures) -> dict[str, object]:
    """Return what a version without the parameter does without: nothing that changes an answer."""
    trace = request.trace
    wanted: dict[str, object] = {}
    if request.priority:
        wanted["priority"] = priority(request.priority)
    if trace is not None:
        wanted["trace_headers"] = dict(as_headers(trace))
    return {name: value for name, value in wanted.items() if signatures.has(GENERATE, name)}
