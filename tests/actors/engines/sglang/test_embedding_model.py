"""The files of models of vectors and scores: what they say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.engines.sglang.embedding_model import ModelMistake, read_model, task_mistake
from protocol.messages.embedding import EmbeddingOutput, Pooling

BERT = {"architectures": ["BertModel"], "max_position_embeddings": 512, "type_vocab_size": 2}
CROSS = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "max_position_embeddings": 32768}
RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
ROBERTA = {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "max_position_embeddings": 514,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
TRANSFORMER, POOLING, NORMALIZE = (
    {"path": path, "type": f"sentence_transformers.models.{kind}"}
    for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
)
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write(folder: Path, config: dict[str, Any], modules: object = None, pooling: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or MEAN))
    return folder


def test_the_pooling_is_that_of_the_models_files(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, BERT, [TRANSFORMER, POOLING, NORMALIZE]), "embed")
    assert (model.pooling, model.normalised, model.whole, model.tokens_max) == (Pooling.MEAN, True, True, 512)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": false}')
    assert read_model(tmp_path, "embed").tokens_max == 256


def test_a_model_without_these_files_has_sglangs_pooling_and_may_be_computed_in_pieces(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, QWEN), "embed")
    assert (model.pooling, model.normalised, model.whole, model.has_halves) == (None, None, False, True)
    assert not model.overrides


@pytest.mark.parametrize(
    ("pooling", "whole"),
    [({"pooling_mode_lasttoken": True}, False), ({"pooling_mode": "lasttoken"}, False), (MEAN, True)],
)
def test_a_decoder_computes_whole_texts_unless_it_pools_by_the_last_token(
    pooling: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    model = read_model(write(tmp_path, QWEN, [TRANSFORMER, POOLING], pooling), "embed")
    assert (model.whole, model.normalised) == (whole, False)


def test_a_score_has_the_activation_that_the_configuration_names(tmp_path: Path) -> None:
    for own, sigmoid in (
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, True),
    ):
        model = read_model(write(tmp_path, {**CROSS, **own}), "score")
        assert (model.output, model.sigmoid, model.has_types) == (EmbeddingOutput.SCORES, sigmoid, True)


def test_pairs_of_some_models_have_no_types_and_positions_begin_behind_the_padding(tmp_path: Path) -> None:
    assert not read_model(write(tmp_path, RERANKER), "score").has_types
    model = read_model(write(tmp_path, ROBERTA), "score")
    assert (model.has_types, model.tokens_max) == (False, 512)


def test_the_type_of_positions_is_given_to_sglang_where_the_file_has_none(tmp_path: Path) -> None:
    assert read_model(write(tmp_path, BERT), "embed").overrides == {"position_embedding_type": "absolute"}
    named = {**BERT, "position_embedding_type": "relative_key"}
    assert not read_model(write(tmp_path, named), "embed").overrides


@pytest.mark.parametrize(
    ("config", "modules", "pooling", "why"),
    [
        (BERT, [TRANSFORMER, POOLING, DENSE, NORMALIZE], MEAN, "has the module Dense in modules.json"),
        (BERT, [TRANSFORMER, NORMALIZE], MEAN, "has the modules Transformer, Normalize: only a transformer with"),
        (
            BERT,
            [{**TRANSFORMER, "path": "0_Transformer"}, POOLING],
            MEAN,
            "its transformer in the folder 0_Transformer",
        ),
        (BERT, [TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pools by max; only cls, mean and lasttoken"),
        (
            BERT,
            [TRANSFORMER, POOLING],
            {**MEAN, "pooling_mode_cls_token": True},
            "pools by cls and mean; only cls, mean and lasttoken",
        ),
        (BERT, [TRANSFORMER, POOLING], {"pooling_mode": "weightedmean"}, "pools by weightedmean"),
        (BERT, [TRANSFORMER, POOLING], {**MEAN, "include_prompt": False}, "leaves the prompt before a text out"),
        ({**QWEN, "is_causal": False}, None, None, "has is_causal = false, and SGLang lets no token see"),
        ({"architectures": ["NomicBertModel"]}, None, None, "is a NomicBertModel, of which SGLang computes no vectors"),
        (CROSS, None, None, "computes scores and no vectors: the task of its engines is score"),
    ],
)
def test_what_cannot_be_computed_as_the_files_say_is_refused_by_name(
    config: dict[str, Any], modules: object, pooling: dict[str, Any] | None, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelMistake, match=why):
        read_model(write(tmp_path, config, modules, pooling), "embed")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BERT, "computes no scores of pairs: the task of its engines is embed"),
        (QWEN, "computes no scores of pairs: the task of its engines is embed"),
        ({"architectures": ["Llava"]}, "is a Llava, which computes no scores of pairs$"),
        ({**CROSS, "id2label": {"0": "a", "1": "b", "2": "c"}}, "has 3 labels, and the score of a pair is one number"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "has 2 labels"),
        (
            {**CROSS, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "has the activation Tanh, and only Sigmoid and Identity are computed",
        ),
    ],
)
def test_a_model_that_scores_otherwise_is_refused_by_name(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelMistake, match=why):
        read_model(write(tmp_path, config), "score")


def test_a_model_of_another_task_is_a_mistake_and_one_that_cannot_be_read_is_left_to_other_checks(
    tmp_path: Path,
) -> None:
    assert task_mistake(tmp_path, "generate") is None
    write(tmp_path, BERT)
    for task, why in (("generate", "is a BertModel, which computes vectors and no answers"), ("embed", None)):
        assert (task_mistake(tmp_path, task) or "").startswith(why or "")
    write(tmp_path, CROSS)
    assert str(task_mistake(tmp_path, "generate")).endswith("the task of its engines is score")
    write(tmp_path, QWEN)
    assert task_mistake(tmp_path, "generate") is None
    other = json.dumps({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1})
    assert task_mistake(tmp_path, "score", other) is None
    assert task_mistake(write(tmp_path, {}), "embed") is None
