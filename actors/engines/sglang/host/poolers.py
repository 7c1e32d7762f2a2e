"""The pooling of a model by its own files, in SGLang's scheduler, and exact to the element.

SGLang takes the pooling from a model's architecture alone. It computes a mean as a difference of running sums over all
texts of a step, in the precision of the model, so a vector depends on the texts before it. It normalises in the
same precision, too. Here each text is summed for itself, in float32. Written for SGLang 0.5.23; called in the
scheduler's process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from sglang.srt.layers import pooler
from sglang.srt.layers.pooler import EmbeddingPoolerOutput, Pooler, PoolingType, pool_hidden_states
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.qwen2_classification import Qwen2ForSequenceClassification
from sglang.srt.models.qwen3_classification import Qwen3ForSequenceClassification
from torch.nn.functional import normalize

from protocol.messages.embedding import Pooling

POOLING = "espalier_pooling"
"""The key of the pooling in what a scheduler reports at its start: its name, and whether vectors are normalised."""

OF_FILES, DEFAULT = "ESPALIER_POOLING", "default"
"""The variable of a scheduler that computes vectors: the pooling of the model's files, or SGLang's own."""

NORMALISED = "+normalise"
"""The end of the variable's value if vectors are normalised."""

Scorer: TypeAlias = Qwen2ForSequenceClassification | Qwen3ForSequenceClassification
TYPES = {Pooling.LAST: PoolingType.LAST, Pooling.CLS: PoolingType.CLS, Pooling.MEAN: PoolingType.MEAN}
NAMES = {kind: pooling for pooling, kind in TYPES.items()}

_sglang_init = Pooler.__init__


def variable(pooling: Pooling | None, *, normalised: bool | None) -> str:
    """Return the value of `OF_FILES` for the pooling of a model's files, None where it has none."""
    return DEFAULT if pooling is None else f"{pooling}{NORMALISED if normalised else ''}"


def pool_by_files(chosen: str) -> None:
    """Make the model of this process pool as `chosen` says, the value of `OF_FILES`; to be called once."""
    if chosen != DEFAULT:
        kind, normalised = TYPES[Pooling(chosen.removesuffix(NORMALISED))], chosen.endswith(NORMALISED)

        def initialize(self: Pooler, *_: object, **__: object) -> None:
            _sglang_init(self, kind, normalised)

        Pooler.__init__ = initialize
    Pooler.forward = forward
    _report(Scheduler)
    # The host applies a model's own function to a score, and for some models SGLang has none.
    pooler.get_cross_encoder_activation_function = lambda _: torch.nn.Identity()
    for model in (Qwen2ForSequenceClassification, Qwen3ForSequenceClassification):
        _leave_out_bias(model)


def forward(self: Pooler, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> EmbeddingPoolerOutput:
    """Return the vectors of the texts of a step, in float32."""
    if self.pooling_type == PoolingType.MEAN:
        vectors = means(hidden_states, forward_batch.extend_seq_lens)
    else:
        vectors = pool_hidden_states(self.pooling_type, hidden_states, forward_batch).float()
    return EmbeddingPoolerOutput(embeddings=normalize(vectors, dim=-1) if self.normalize else vectors)


def means(states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the mean state of each text, in float32; `states` has the tokens of all texts in a row."""
    texts = torch.repeat_interleave(torch.arange(len(lengths), device=states.device), lengths)
    sums = torch.zeros((len(lengths), states.shape[-1]), device=states.device)
    return sums.index_add_(0, texts, states[: len(texts)].float()) / lengths.unsqueeze(-1)


def _leave_out_bias(model: type[Scorer]) -> None:
    """Set the bias of a model's score to zero: its weights have none, and SGLang would leave random numbers there."""
    load = model.load_weights

    def load_weights(self: Scorer, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        loaded = load(self, weights)
        self.score.bias.data.zero_()
        return loaded

    model.load_weights = load_weights


def _report(scheduler_class: type[Scheduler]) -> None:
    """Have the scheduler of this process report the pooling of its model."""
    init_info = scheduler_class.get_init_info

    def get_init_info(scheduler: Scheduler) -> dict[str, object]:
        found = getattr(scheduler.tp_worker.model_runner.model, "pooler", None)
        report = (Pooling.HEAD.value, False)
        if isinstance(found, Pooler):
            report = (NAMES[found.pooling_type].value, bool(found.normalize))
        return {**init_info(scheduler), POOLING: report}

    scheduler_class.get_init_info = get_init_info
