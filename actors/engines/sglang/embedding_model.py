"""A model for vectors or scores by the files of its folder, and what an engine needs for it.

SGLang pools by a model's architecture alone. The pooling and the length of a vector are the model's own, in the files
of sentence-transformers, and a model without these files has SGLang's. What cannot be computed as the files say is
refused by name. Only JSON is read here, by the node as well as by the engine's process. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, cast

from attrs import Factory, evolve, frozen

from protocol.messages.embedding import EmbeddingOutput, Pooling

_Table: TypeAlias = Mapping[str, object]

CONFIG, MODULES, SENTENCES, POOLING = "config.json", "modules.json", "sentence_bert_config.json", "config.json"
FILE_BYTES_MAX = 16 * 1024 * 1024

OUTPUTS = {"embed": EmbeddingOutput.VECTORS, "score": EmbeddingOutput.SCORES}
"""What an engine computes, by its `task`."""

ENCODERS = frozenset({"BertModel", "Contriever", "XLMRobertaModel"})
"""Architectures of vectors whose tokens see all tokens of a text."""
SCORING_ENCODERS = frozenset({"BertForSequenceClassification", "XLMRobertaForSequenceClassification"})
SCORING_DECODERS = frozenset({"Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification"})
SCORING = SCORING_ENCODERS | SCORING_DECODERS
VECTOR_DECODERS = frozenset({"Qwen3Model", "LlamaEmbeddingModel", "MistralModel"})
GENERATING = "ForCausalLM"
"""The end of the architectures that compute answers, or vectors if an engine is told to."""

BIDIRECTIONAL = (("is_causal", False), ("use_bidirectional_attention", True))
"""Keys, with their values, of decoders whose tokens see all tokens: SGLang computes these as any other."""

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
POOLINGS = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
ACTIVATIONS = {"Sigmoid": True, "Identity": False}
"""Whether the activation of a score by this name is a sigmoid."""

_USE = "the task of its engines is"


class ModelMistake(ValueError):
    """A model cannot be served for its engine's task; the text is the end of a sentence about the model."""


@frozen
class EmbedderModel:
    """A model for vectors or scores, by its files; `pooling` and `normalised` are None where SGLang's own hold."""

    output: EmbeddingOutput
    whole: bool  # whether a text must be computed in one step, without a cached beginning
    pooling: Pooling | None = None
    normalised: bool | None = None
    sigmoid: bool = False  # whether a score is the sigmoid of the model's number
    has_types: bool = False  # whether the model tells the texts of a pair apart by types of tokens
    tokens_max: int | None = None  # of one text; None: the context of the model
    overrides: Mapping[str, object] = Factory(dict)  # of its configuration, where SGLang needs what it does not have
    has_halves: bool = False  # whether its weights are of half precision


def task_mistake(folder: Path, task: str, overrides: str = "{}") -> str | None:
    """Return why a model cannot be served for a task, as the end of a sentence; None if it can, or cannot be read."""
    try:
        if task == "generate":
            _check_generates(_architecture({**_read(folder / CONFIG), **_table(json.loads(overrides))}))
        else:
            read_model(folder, task, overrides)
    except ModelMistake as mistake:
        return str(mistake)
    except (OSError, ValueError, RecursionError):
        return None  # other checks report a folder without a configuration
    return None


def read_model(folder: Path, task: str, overrides: str = "{}") -> EmbedderModel:
    """Return a model by its files; `overrides` is JSON with keys in place of its configuration's.

    Raises `ModelMistake` if it cannot be served for the task, `OSError` and `ValueError` for unreadable files.
    """
    config = {**_read(folder / CONFIG), **_table(json.loads(overrides))}
    architecture, output = _architecture(config), OUTPUTS[task]
    _check_output(architecture, output, config)
    model = EmbedderModel(
        output,
        whole=architecture in ENCODERS | SCORING_ENCODERS,
        tokens_max=_tokens_max(config, architecture),
        has_halves=config.get("dtype", config.get("torch_dtype")) in {"bfloat16", "float16"},
    )
    if model.whole and "position_embedding_type" not in config:  # SGLang reads it, and today's files do not have it
        model = evolve(model, overrides={"position_embedding_type": "absolute"})
    if output is EmbeddingOutput.SCORES:
        types = config.get("type_vocab_size", 0)
        has_types = model.whole and isinstance(types, int) and types > 1
        return evolve(model, sigmoid=_sigmoid(config), has_types=has_types)
    return _with_modules(model, folder)


def _check_generates(architecture: str) -> None:
    if architecture in ENCODERS | VECTOR_DECODERS:
        raise ModelMistake(f"is a {architecture}, which computes vectors and no answers: {_USE} embed")
    if architecture in SCORING:
        raise ModelMistake(f"is a {architecture}, which computes scores and no answers: {_USE} score")


def _check_output(architecture: str, output: EmbeddingOutput, config: _Table) -> None:
    """Raise `ModelMistake` for a model whose output is another."""
    computes_vectors = architecture in ENCODERS | VECTOR_DECODERS or architecture.endswith(GENERATING)
    if output is EmbeddingOutput.SCORES:
        if architecture not in SCORING:
            better = f": {_USE} embed" if computes_vectors else ""
            raise ModelMistake(f"is a {architecture}, which computes no scores of pairs{better}")
        if (labels := _labels(config)) != 1:
            raise ModelMistake(f"has {labels} labels, and the score of a pair is one number")
    elif architecture in SCORING:
        raise ModelMistake(f"is a {architecture}, which computes scores and no vectors: {_USE} score")
    elif not computes_vectors:
        raise ModelMistake(f"is a {architecture}, of which SGLang computes no vectors")
    for key, value in BIDIRECTIONAL:
        if config.get(key) is value:
            raise ModelMistake(f"has {key} = {str(value).lower()}, and SGLang lets no token see those behind it")


def _labels(config: _Table) -> int:
    """Return the number of labels, as transformers finds it."""
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict):
        return len(labels)
    return number if isinstance(number, int) else 2


def _sigmoid(config: _Table) -> bool:
    """Return whether a score is a sigmoid: by the model's own files, else as sentence-transformers has it."""
    own = _table(config.get("sentence_transformers")).get("activation_fn")
    named = own or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    name = str(named).rpartition(".")[2].removesuffix("()")
    if name not in ACTIVATIONS:
        raise ModelMistake(f"has the activation {name}, and only Sigmoid and Identity are computed")
    return ACTIVATIONS[name]


def _tokens_max(config: _Table, architecture: str) -> int | None:
    """Return the most tokens for which an encoder has positions."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or architecture not in ENCODERS | SCORING_ENCODERS:
        return None
    padding = config.get("pad_token_id", 1)
    offset = padding + 1 if architecture.startswith("XLMRoberta") and isinstance(padding, int) else 0
    return positions - offset


def _with_modules(model: EmbedderModel, folder: Path) -> EmbedderModel:
    """Return a model with the pooling of its `modules.json`, if it has one."""
    if not (folder / MODULES).is_file():
        return model
    kinds: list[str] = []
    for module in _list(folder / MODULES):
        kind, path = str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))
        kinds.append(kind)
        if kind == "Transformer" and path:
            raise ModelMistake(f"has its transformer in the folder {path}, and its configuration must be in its own")
        if kind == "Pooling":
            model = evolve(model, pooling=_pooling(_read(folder / path / POOLING)))
        elif kind not in {"Transformer", "Normalize"}:
            raise ModelMistake(f"has the module {kind} in {MODULES}, which SGLang does not compute")
    if kinds[:2] != ["Transformer", "Pooling"] or len(kinds) > 3 or kinds[2:] not in ([], ["Normalize"]):
        raise ModelMistake(f"has the modules {', '.join(kinds)}: only a transformer with a pooling can be computed")
    if (folder / SENTENCES).is_file():
        longest = _read(folder / SENTENCES).get("max_seq_length")
        if isinstance(longest, int) and longest > 0:
            model = evolve(model, tokens_max=min(longest, model.tokens_max or longest))
    return evolve(model, normalised=kinds[2:] == ["Normalize"], whole=model.whole or model.pooling is not Pooling.LAST)


def _pooling(config: _Table) -> Pooling:
    modes = [name for key, name in MODES.items() if config.get(key) is True]
    if not modes and isinstance(config.get("pooling_mode"), str):
        modes = [str(config["pooling_mode"])]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelMistake(f"pools by {' and '.join(modes) or 'nothing'}; only cls, mean and lasttoken are possible")
    if config.get("include_prompt") is False:
        raise ModelMistake("leaves the prompt before a text out of its pooling, which is not possible here")
    return POOLINGS[modes[0]]


def _architecture(config: _Table) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ValueError("a configuration without architectures")
    return str(architectures[0])


def _read(file: Path) -> _Table:
    return _table(json.loads(_text(file)))


def _list(file: Path) -> list[_Table]:
    found = json.loads(_text(file))
    return [_table(each) for each in found] if isinstance(found, list) else []


def _text(file: Path) -> str:
    with file.open("rb") as opened:
        return opened.read(FILE_BYTES_MAX).decode()


def _table(value: object) -> _Table:
    return cast("_Table", value) if isinstance(value, dict) else {}
