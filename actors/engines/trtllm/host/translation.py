"""Translation between TensorRT-LLM's objects and the project's messages: calls, steps, errors, engine info."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from attrs import define, evolve, field, frozen

from actors.engines import model_files
from actors.engines.trtllm.boot_message import TrtllmBoot
from actors.engines.trtllm.deltas import Deltas, Ending, ending
from actors.engines.trtllm.handed import HandedState, context_fields, generation_fields, read_state
from actors.engines.trtllm.host.library import Library, Result
from actors.engines.trtllm.images import AUTO, media_info
from actors.engines.trtllm.log_probabilities import read, read_prompt
from actors.engines.trtllm.sampling import engine_request
from actors.engines.trtllm.signatures import PREPROCESS, SCHEDULING, Signatures
from actors.media.model_files import vision_layout
from protocol.errors import EngineRefused, HandOffFailed, RequestError, Unsupported
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate, GrammarKind, PromptScores, Tokens
from protocol.messages.media import MediaForm, MediaInfo

BIAS = "embedding_bias"  # the field of `SamplingParams` that is a tensor
CONFIG = "config.json"
CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions")
GENERATION_CONFIG = "generation_config.json"


# Calls ---------------------------------------------------------------------------------------


def call(names: Library, request: Generate, info: EngineInfo, ends: tuple[int, ...]) -> dict[str, object]:
    """Return the arguments of `generate_async` for a request; `ends` are the model's end-of-sequence tokens."""
    wanted, handed = engine_request(request, info, ends), _handed(names, request, info)
    sampling = dict(wanted.sampling)
    if BIAS in sampling:
        sampling[BIAS] = _tensor(cast("list[float]", sampling[BIAS]))
    if wanted.guided is not None:
        sampling["guided_decoding"] = names.guided_decoding(**wanted.guided)
    rank = {} if wanted.scheduling is None else {"scheduling_params": names.scheduling_params(**wanted.scheduling)}
    return {**wanted.call, **handed, **rank, "sampling_params": names.sampling_params(**sampling)}


def _handed(names: Library, request: Generate, info: EngineInfo) -> dict[str, object]:
    """Return the argument for a leg of a pair: none for an engine of both, and for a decode without a partner."""
    if info.returns_states:
        return {"disaggregated_params": names.disaggregated_params(**context_fields())}
    if not info.is_decode or (state := read_state(request, info)) is None:
        return {}

    def logprob(value: float, rank: int | None) -> object:
        return names.logprob(logprob=value, rank=rank)

    return {"disaggregated_params": names.disaggregated_params(**generation_fields(state, logprob))}


class _Torch(Protocol):
    float32: object

    def tensor(self, data: Sequence[float], *, dtype: object) -> object: ...


def _tensor(values: list[float]) -> object:
    torch = cast("_Torch", import_module("torch"))
    return torch.tensor(values, dtype=torch.float32)


def state_for(request: Generate, info: EngineInfo) -> HandedState | None:
    """Return the state with which a decode is asked, None for any other request."""
    return read_state(request, info) if info.is_decode else None


def whole_answer(request: Generate, state: HandedState) -> AnswerPart:
    """Return the answer of a prompt whose first token has ended it: the engine is not asked."""
    ids, places = state.handed.first_gen_tokens, state.handed.first_gen_log_probs or ()
    found = [{token: Likely(value, rank) for token, value, rank in place} for place in places]
    logprobs = () if request.logprobs is None else read(found, ids, request.logprobs)
    return AnswerPart(Tokens(ids, logprobs), state.ending, state.cached_tokens)


# Steps ---------------------------------------------------------------------------------------


@frozen
class AnswerPart:
    """The addition of a step to an answer."""

    tokens: Tokens | None
    ending: Ending | None
    cached_tokens: int = 0
    scores: PromptScores | None = None


@frozen
class Likely:
    """A log probability of a state, as TensorRT-LLM's own are read."""

    logprob: float
    rank: int | None


@define(eq=False)
class Reader:
    """Reads the additions of a request's steps; `ends` are the model's end-of-sequence tokens."""

    request: Generate
    ends: tuple[int, ...]
    cached_tokens: int | None = None  # of a decode's prompt, by its prefill: the engine counts all that it fetches
    _deltas: Deltas = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._deltas = Deltas(self.request.logprobs)

    def read(self, result: Result) -> AnswerPart:
        """Return the addition of the present step; raises the error of an answer that is not whole."""
        output, wanted, is_first = result.outputs[0], self.request, not self._deltas.count
        end = ending(output, self.ends)
        tokens = self._deltas.take(output)
        scores = None
        if wanted.prompt_logprobs and is_first and tokens is not None:
            found = output.prompt_logprobs or ()
            scores = read_prompt(found, wanted.tokens, wanted.scored_tokens, wanted.logprobs or 0)
        cached_tokens = int(getattr(result, "cached_tokens", 0) or 0)
        return AnswerPart(tokens, end, cached_tokens if self.cached_tokens is None else self.cached_tokens, scores)


def request_error(error: Exception, *, waits_for_transfer: bool) -> RequestError:
    """Return the error of a request that the engine has failed alone."""
    why = str(error) or type(error).__name__
    return HandOffFailed(why) if waits_for_transfer else EngineRefused(why)


# The engine ------------------------------------------------------------------------------------


def engine_info(boot: TrtllmBoot, version: str, digest: tuple[tuple[str, str], ...], process: str) -> EngineInfo:
    """Return the properties and limits of an engine; `digest` is of its model's folder, `process` names this life."""
    config = _config(model_folder(boot) / CONFIG)
    asked, limit = boot.arguments.get("max_seq_len"), _first(config, CONTEXT_KEYS)
    context_max = asked if isinstance(asked, int) else limit
    if context_max is None:
        raise Unsupported("the model's configuration has no limit on tokens: set context_max")
    vocabulary_size = _first(config, ("vocab_size",))
    if vocabulary_size is None:
        raise Unsupported("the model's configuration has no vocab_size")
    if boot.data_parallel > 1 and not Signatures.of(version).holds(SCHEDULING):
        raise Unsupported(f"TensorRT-LLM {version} cannot be given a rank: data_parallel must be 1")
    return EngineInfo(
        kind="trtllm",
        version=version,
        vocabulary_size=vocabulary_size,
        context_max=context_max,
        kv_tokens_max=boot.kv_tokens_max,
        request_tokens_max=min(context_max, boot.kv_tokens_max - boot.page_size),
        running_max=boot.slots,
        page_size=boot.page_size,
        honours_seed=False,
        grammars=tuple(GrammarKind),
        hand_off=HandOff.NONE if boot.leg is Leg.BOTH else HandOff.SEQUENTIAL,
        hand_off_address=process.encode() if boot.leg is Leg.PREFILL else None,
        digest=digest,
        data_parallel=boot.data_parallel,
        media=_media(boot, version),
        hand_off_terms=() if boot.leg is Leg.BOTH else (("transfer", boot.transfer),),
    )


def _media(boot: TrtllmBoot, version: str) -> MediaInfo | None:
    """Return the images that an engine takes, None if it takes text alone."""
    files = model_files.read_files(model_folder(boot))
    layout = vision_layout(files)
    if layout is None or layout.image_token is None or not Signatures.of(version).holds(PREPROCESS):
        return None
    form = MediaForm.PIXELS if boot.has_tower else MediaForm.EMBEDDINGS
    return media_info(files, layout.image_token, layout.merge, form, str(boot.arguments.get("dtype", AUTO)))


def with_operations(info: EngineInfo, names: tuple[str, ...]) -> EngineInfo:
    """Return an engine's info with the names of its operations."""
    return evolve(info, operations=names)


def model_folder(boot: TrtllmBoot) -> Path:
    """Return the folder of the engine's model."""
    return Path(str(boot.arguments["model"]))


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a model, by its configuration of generation or its own."""
    for name in (GENERATION_CONFIG, CONFIG):
        if (folder / name).exists() and (found := _config(folder / name).get("eos_token_id")) is not None:
            many = cast("list[object]", found if isinstance(found, list) else [found])
            return tuple(each for each in many if isinstance(each, int))
    return ()


def _config(file: Path) -> Mapping[str, object]:
    found = json.loads(file.read_text())
    inner = found.get("text_config")
    return cast("Mapping[str, object]", inner if isinstance(inner, dict) else found)


def _first(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    return next((value for key in keys if isinstance(value := config.get(key), int)), None)
