"""Vectors and scores on their way from SGLang's scheduler to the host, as packed float32.

SGLang makes a list of Python floats of each vector and sends it with forty other fields by way of its detokenizer. Here
the rows of one step are one string of bytes, in one message with the ids of their items, on the socket of the steps
(`host/outputs.py`). The same message reports dropped items, so the host learns of each release from one place and in
order. Written for SGLang 0.5.23; the functions that change SGLang run in the scheduler's
process.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.utils import EmbeddingBatchResult

from actors.engines.sglang.host.outputs import EngineFinishReason

Rows: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float32]]
_Row: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float32]]
ABORTED: EngineFinishReason = {"type": "abort"}


class VectorStep(NamedTuple):
    """The items that ended in a step: `rows` has a row of float32 for each of `ids`; `failed` have none."""

    ids: list[str]
    rows: bytes
    failed: dict[str, EngineFinishReason]

    @property
    def matrix(self) -> Rows:
        """The rows as an array of shape [ids, elements]."""
        return np.frombuffer(self.rows, "<f4").reshape(len(self.ids), -1)


def send_vectors() -> None:
    """Make the scheduler of this process send `VectorStep`s by its `StepSender`; to be called once."""
    SchedulerBatchResultProcessor._convert_embeddings = _rows  # noqa: SLF001
    SchedulerOutputStreamer._stream_output_embedding = _send_ended  # noqa: SLF001
    Scheduler.send_abort_output = _send_aborted


def _rows(_: SchedulerBatchResultProcessor, *, result: EmbeddingBatchResult) -> list[_Row]:
    """Return the rows of a step, in place of lists of floats."""
    found = result.embeddings
    if isinstance(found, torch.Tensor):
        rows = found.detach().to("cpu", torch.float32)
        return list(rows.reshape(len(rows), -1).numpy())
    return [row.detach().to("cpu", torch.float32).reshape(-1).numpy() for row in found]


def _send_ended(streamer: SchedulerOutputStreamer, reqs: list[Req]) -> None:
    """Send the items of a step, without texts that go on in a later step."""
    ids: list[str] = []
    rows: list[_Row] = []
    failed: dict[str, EngineFinishReason] = {}
    for req in reqs:
        if not req.finished():
            continue
        reason = req.finished_reason.to_json()
        if reason["type"] == "abort":
            status = reason["status_code"]
            failed[req.rid] = {
                "type": "abort",
                "message": reason["message"],
                "status_code": None if status is None else int(status),
            }
        else:
            ids.append(req.rid)
            rows.append(req.embedding)
    if ids or failed:
        streamer.rust_server.send(VectorStep(ids, np.stack(rows).tobytes() if rows else b"", failed))


def _send_aborted(scheduler: Scheduler, abort: AbortReq, req: Req) -> None:
    """Send the id of an item that has left the queue, or ended between two pieces of its prompt."""
    scheduler.output_streamer.rust_server.send(VectorStep([], b"", {req.rid: abort.finished_reason or ABORTED}))
