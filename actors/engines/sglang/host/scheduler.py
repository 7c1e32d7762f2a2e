"""What runs in SGLang's scheduler process: SGLang's own scheduler, and an abort that does not wait its turn.

SGLang only marks a request whose grammar is being compiled. It must then be compiled, find room in the KV memory, and
pass through a step of the model before its asker hears that it is gone, which with a full memory takes as long as the
answers that fill it. Here it ends at once, as a request in the waiting queue does: neither holds anything yet.
"""

from __future__ import annotations

from concurrent.futures import Future

from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import _make_abort_req, run_scheduler_process

from actors.engines.sglang.host import penalties

_mark = GrammarManager.abort_requests


def run(*arguments: object, **named: object) -> None:
    """Be the scheduler's process; SGLang starts it under this name, forked or spawned."""
    GrammarManager.abort_requests = abort_requests
    penalties.count_resumed_tokens()
    run_scheduler_process(*arguments, **named)


def abort_requests(manager: GrammarManager, asked: AbortReq) -> None:
    """End the requests that wait for their grammars: all ranks of a stage do so alike, in the same turn."""
    if manager.pp_size > 1:  # later stages hear of this queue by places in it, so it must not change in between
        _mark(manager, asked)
        return
    left = {req.rid for req in manager.grammar_queue if asked.abort_all or req.rid.startswith(asked.rid)}
    gone = [req for req in manager.grammar_queue if req.rid in left]
    manager.grammar_queue = [req for req in manager.grammar_queue if req.rid not in left]
    for req in gone:
        _end(manager, req, asked)


def _end(manager: GrammarManager, req: Req, asked: AbortReq) -> None:
    """End one request as `Scheduler.abort_request` ends one that waits; what its compile makes is dropped."""
    if isinstance(req.grammar, Future):
        req.grammar.cancel()  # unless a thread is at it already
    scheduler = manager.scheduler
    scheduler._release_aborted_request(req)  # noqa: SLF001
    scheduler.beam_coordinator.retire_group(req)
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=asked.finished_reason), req)
