"""Penalties of resumed answers: the tokens from another engine count as well.

SGLang counts only its own generated tokens, the rest of a resumed answer: the earlier tokens stand at the end of the
prompt, and are counted here. A scheduler that runs one step ahead of its results (SGLang's overlap) counts each token
one step late, and at first the prompt's last token; here the same tokens are counted as it would have counted by then.
When another prompt is computed between two of its steps, it counts one token twice and misses another, so that with
penalties an answer depends on the other requests of its batch, resumed or not: `disable_overlap_schedule` (the default
on a CPU) makes it exact. Written for SGLang 0.5.23; called in the scheduler's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

RESUMED_TOKENS = "espalier_resumed_tokens"
"""The key of a request's `custom_params` for the number of answer tokens at the end of its prompt."""


class _Batch(Protocol):
    enable_overlap: bool


class _Orchestrator(Protocol):
    batch: _Batch
    device: str

    def reqs(self) -> list[Req]: ...


class _Penalizer(Protocol):
    orchestrator: _Orchestrator
    cumulated_frequency_penalties: torch.Tensor
    cumulated_presence_penalties: torch.Tensor
    cumulated_repetition_penalties: torch.Tensor

    def _prepare(self) -> None: ...


Count = Callable[[_Penalizer, Req, int, torch.Tensor], None]


def count_resumed_tokens() -> None:
    """Make every penalizer of this process count resumed tokens first; to be called once."""
    _after(BatchedFrequencyPenalizer, _frequency)
    _after(BatchedPresencePenalizer, _presence)
    _after(BatchedRepetitionPenalizer, _repetition)


def _after(kind: type[_Penalizer], count: Count) -> None:
    prepare = kind._prepare  # noqa: SLF001

    def prepared(self: _Penalizer) -> None:
        prepare(self)
        orchestrator = self.orchestrator
        for row, req in enumerate(orchestrator.reqs()):
            resumed = (req.sampling_params.custom_params or {}).get(RESUMED_TOKENS, 0)
            if resumed:
                end = len(req.origin_input_ids) - orchestrator.batch.enable_overlap
                ids = torch.tensor(req.origin_input_ids[max(0, end - resumed) : end], dtype=torch.int64)
                count(self, req, row, ids.to(orchestrator.device))

    kind._prepare = prepared  # type: ignore[method-assign]  # noqa: SLF001


def _frequency(penalizer: _Penalizer, req: Req, row: int, ids: torch.Tensor) -> None:
    once = torch.full_like(ids, req.sampling_params.frequency_penalty, dtype=torch.float32)
    penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, once)


def _presence(penalizer: _Penalizer, req: Req, row: int, ids: torch.Tensor) -> None:
    penalizer.cumulated_presence_penalties[row, ids] = req.sampling_params.presence_penalty


def _repetition(penalizer: _Penalizer, req: Req, row: int, ids: torch.Tensor) -> None:
    penalizer.cumulated_repetition_penalties[row, ids] = req.sampling_params.repetition_penalty
