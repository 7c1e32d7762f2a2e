"""Exact penalties: each token of an answer counts once, before the next one is drawn.

SGLang counts the last known token of each request when it prepares a step of the decode. With its overlap (the default
on a GPU) the result of the step before is not known by then: each token counts a step late, the prompt's last token in
place of the first one, and one token twice and another never whenever a prompt is computed in between, so that an
answer would depend on the other requests of its batch. Here the tokens are counted when the step begins. The result of
the step before is processed first if a request in the batch has penalties; such a batch does without the overlap.

After a retraction SGLang begins to count anew, those towards `min_new_tokens` too, and the tokens that a resumed
request has from another engine stand at the end of its prompt, where SGLang counts none: here both are counted with the
prompt. Speculative decoding counts one
token a step, and is left as it is. Written for SGLang 0.5.23; called in the scheduler's process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from attrs import frozen
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

RESUMED_TOKENS = "espalier_resumed_tokens"
"""The key of a request's `custom_params` for the number of answer tokens at the end of its prompt."""

COUNTED = "espalier_counted_tokens"
"""The attribute of a request with the number of its answer's tokens that each kind of penalizer has counted."""


class _Speculation(Protocol):
    def is_none(self) -> bool: ...


class _Batch(Protocol):
    spec_algorithm: _Speculation


class _Orchestrator(Protocol):
    batch: _Batch
    device: str

    def reqs(self) -> list[Req]: ...


class _Penalizer(Protocol):
    orchestrator: _Orchestrator

    def is_prepared(self) -> bool: ...

    def _prepare(self) -> None: ...

    def _cumulate_output_tokens(self, output_ids: torch.Tensor) -> None: ...


@frozen
class _Kind:
    """One kind of penalties: its parameter of a request, the value without effect, and the sums by row and token."""

    penalizer: type[_Penalizer]
    parameter: str
    neutral: float
    sums: str
    adds: bool = False  # whether each occurrence of a token counts, not only the first

    def value(self, req: Req) -> float:
        """Return the penalty of a request."""
        return float(getattr(req.sampling_params, self.parameter))

    def count(self, penalizer: _Penalizer, reqs: Sequence[Req], *, resumed: bool) -> None:
        """Count the tokens of each request's answer that it has not counted, with the `resumed` ones if wanted."""
        rows, ids, values = list[int](), list[int](), list[float]()
        for row, req in enumerate(reqs):
            value = self.value(req)
            if value == self.neutral:
                continue
            counted: dict[str, int] = req.__dict__.setdefault(COUNTED, {})
            tokens = _resumed_tokens(req) if resumed else []
            tokens += req.output_ids[0 if resumed else counted.get(self.parameter, 0) :]
            counted[self.parameter] = len(req.output_ids)
            rows += [row] * len(tokens)
            ids += tokens
            values += [value] * len(tokens)
        if rows:
            device, sums = penalizer.orchestrator.device, getattr(penalizer, self.sums)
            where = tuple(torch.tensor(index, dtype=torch.int64).to(device) for index in (rows, ids))
            sums.index_put_(where, torch.tensor(values, dtype=sums.dtype).to(device), accumulate=self.adds)


KINDS = (
    _Kind(BatchedFrequencyPenalizer, "frequency_penalty", 0.0, "cumulated_frequency_penalties", adds=True),
    _Kind(BatchedPresencePenalizer, "presence_penalty", 0.0, "cumulated_presence_penalties"),
    _Kind(BatchedRepetitionPenalizer, "repetition_penalty", 1.0, "cumulated_repetition_penalties"),
)

_sglang_prepare_least_length = BatchedMinNewTokensPenalizer._prepare  # noqa: SLF001
_sglang_run_batch = Scheduler.run_batch
_sglang_is_in_step = Scheduler.is_disable_overlap_for_batch


def _resumed_tokens(req: Req) -> list[int]:
    """Return the tokens of the answer that another engine has computed."""
    resumed = (req.sampling_params.custom_params or {}).get(RESUMED_TOKENS, 0)
    return list(req.origin_input_ids[len(req.origin_input_ids) - resumed :]) if resumed else []


def count_exactly() -> None:
    """Make the scheduler of this process count exactly; to be called once."""
    for kind in KINDS:
        _count_with_the_prompt(kind)
        _count_nothing_early(kind.penalizer)
    BatchedMinNewTokensPenalizer._prepare = _prepare_least_length  # noqa: SLF001
    Scheduler.run_batch = _run_batch
    Scheduler.is_disable_overlap_for_batch = _is_in_step


def _prepare_least_length(self: BatchedMinNewTokensPenalizer) -> None:
    """Prepare the least length of answers, with the tokens that retracted requests have already."""
    _sglang_prepare_least_length(self)
    lengths = [[len(req.output_ids)] for req in self.orchestrator.reqs()]
    self.len_output_tokens += torch.tensor(lengths, dtype=torch.int32).to(self.orchestrator.device)


def _count_with_the_prompt(kind: _Kind) -> None:
    prepare = kind.penalizer._prepare  # noqa: SLF001

    def prepared(self: _Penalizer) -> None:
        prepare(self)
        kind.count(self, self.orchestrator.reqs(), resumed=True)

    kind.penalizer._prepare = prepared  # type: ignore[method-assign]  # noqa: SLF001


def _count_nothing_early(penalizer: type[_Penalizer]) -> None:
    sglang: Callable[[_Penalizer, torch.Tensor], None] = penalizer._cumulate_output_tokens  # noqa: SLF001

    def cumulate(self: _Penalizer, output_ids: torch.Tensor) -> None:
        if not self.orchestrator.batch.spec_algorithm.is_none():
            sglang(self, output_ids)

    penalizer._cumulate_output_tokens = cumulate  # type: ignore[method-assign]  # noqa: SLF001


def _counted(batch: ScheduleBatch | None) -> list[tuple[_Kind, _Penalizer]]:
    """Return the penalizers of a batch with steps of the decode, if it has requests with penalties."""
    if batch is None or not (batch.forward_mode.is_decode() or batch.forward_mode.is_mixed()):
        return []
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not orchestrator.is_required or not batch.spec_algorithm.is_none():
        return []
    found = ((kind, orchestrator.penalizers.get(kind.penalizer)) for kind in KINDS)
    return [(kind, penalizer) for kind, penalizer in found if penalizer is not None and penalizer.is_prepared()]


def _is_in_step(scheduler: Scheduler, batch: ScheduleBatch | None, last_batch: ScheduleBatch | None) -> bool:
    """Whether the result of the last batch is processed before a batch is run."""
    if scheduler.result_queue and _counted(batch):
        return True
    in_step: bool = _sglang_is_in_step(scheduler, batch, last_batch)
    return in_step


def _run_batch(scheduler: Scheduler, batch: ScheduleBatch, *arguments: object, **named: object) -> object:
    """Count the tokens so far, and run a batch."""
    for kind, penalizer in _counted(batch):
        kind.count(penalizer, batch.reqs, resumed=False)
    return _sglang_run_batch(scheduler, batch, *arguments, **named)
