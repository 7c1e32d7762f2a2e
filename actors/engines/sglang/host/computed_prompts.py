"""The prompts that a scheduler has computed for decodes that have not been asked yet, reported to its host.

SGLang computes a prompt before its decode is there (`optimistic_prefill_attempts`), and reports nothing of it until
the decode has its KV cache. A prefill of a sequential hand-off is asked for exactly that: its host sends the state of a
prompt once the prompt is computed. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_disagg

from actors.engines.sglang.host.outputs import StepOutput, StepSender
from protocol.weight_versions import VERSION_CHARACTERS_MAX

_sglang_process = Scheduler.process_batch_result_disagg_prefill
_REPORTED = "espalier_reported"


def report() -> None:
    """Make the scheduler of this process report computed prompts; to be called once."""
    Scheduler.process_batch_result_disagg_prefill = _process


def _process(scheduler: Scheduler, *arguments: object, **named: object) -> None:
    """Process the result of a batch as SGLang does, and report the prompts that have no decode yet."""
    _sglang_process(scheduler, *arguments, **named)
    if not get_disagg().optimistic_prefill_attempts:
        return
    new = [req for req in scheduler.disagg_prefill_inflight_queue if req.pending_bootstrap and not _is_reported(req)]
    sender = scheduler.output_streamer.rust_server
    if new and isinstance(sender, StepSender):
        sender.send(computed(new, sender.version))


def _is_reported(req: Req) -> bool:
    """Return whether a request has been reported before this call, which notes that it is reported."""
    reported = hasattr(req, _REPORTED)
    setattr(req, _REPORTED, True)
    return reported


def computed(requests: list[Req], version: str) -> StepOutput:
    """Return a step with no token for some requests, and with their cached tokens and the version of the weights."""
    return StepOutput(
        ids=[req.rid for req in requests],
        counts=[0] * len(requests),
        tokens=[],
        cached_tokens=[req.cached_tokens for req in requests],
        finished={},
        logprobs={},
        scored={},
        version=version[:VERSION_CHARACTERS_MAX],
    )
