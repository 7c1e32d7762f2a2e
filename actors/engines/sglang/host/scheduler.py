"""The scheduler's process: SGLang's own scheduler, with aborts and KV events that do not wait.

SGLang only marks a request that waits for a grammar as aborted. The abort is reported only once its grammar is
compiled, and the request has got KV memory and passed through a step of the model. With a full memory that takes as
long as the answers in it. Here it ends at once, as a request in the waiting queue does: neither holds anything yet.

SGLang publishes KV events after a prefill, when it is idle, and else with its statistics, each 40th decode step: until
then no router can find the cached answer, and its next turn may go elsewhere. Here each step's events are published
after it. In the hashes of an adapter's blocks SGLang has an id of its own, unknown to any router: here they have the
salt of the adapter alone (`Generate.cache_namespace`). With `enable_metrics` it also sends counts of its memory to a
socket without a reader, where they would wait for ever: here it sends none. A paused scheduler would use a whole core:
here it sleeps as an idle one does. And one that joins a group of processes would wait half an hour for the others: here
it waits for a minute. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

import torch
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req, run_scheduler_process
from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.model_executor.model_runner_components import weight_updater

from actors.engines.sglang.boot_message import EMBEDDINGS_ONLY, VISION_PART
from actors.engines.sglang.host import computed_prompts, hand_off_terms, outputs, penalties, poolers, vectors
from actors.engines.sglang.host.vision import towers
from protocol.messages.weights import JOIN_WITHIN_S

_sglang_abort = GrammarManager.abort_requests
_sglang_record_paused = Scheduler._record_scheduler_state_for_paused_engine  # noqa: SLF001
_sglang_report = SchedulerMetricsReporter.report_decode_stats


def run(*arguments: object, **named: object) -> None:
    """Run the scheduler; SGLang starts its process at this function, forked or spawned."""
    prepare()
    run_scheduler_process(*arguments, **named)


def prepare() -> None:
    """Change the scheduler of this process; to be called once."""
    GrammarManager.abort_requests = abort_requests
    SchedulerMetricsReporter.report_decode_stats = report_decode_stats
    SchedulerKvEventsPublisher.emit_kv_metrics = emit_no_metrics
    KvEventLoraNames.get = name_no_adapter
    Scheduler._record_scheduler_state_for_paused_engine = sleep_while_paused  # noqa: SLF001
    join, timeout = weight_updater.init_custom_process_group, timedelta(seconds=JOIN_WITHIN_S)
    weight_updater.init_custom_process_group = partial(join, timeout=timeout)
    penalties.count_exactly()
    outputs.send_steps()
    computed_prompts.report()
    hand_off_terms.report()
    if (pooling := os.environ.get(poolers.OF_FILES)) is not None:
        poolers.pool_by_files(pooling)
        vectors.send_vectors()
    if os.environ.get(VISION_PART) == EMBEDDINGS_ONLY:
        towers.leave_out_towers()
    elif not torch.cuda.is_available():
        towers.encode_items_alone()


def abort_requests(manager: GrammarManager, abort: AbortReq) -> None:
    """End the requests that wait for their grammars; all ranks of a pipeline stage do so in the same iteration."""
    if manager.pp_size > 1:  # later stages refer to this queue by index, so it must not change in between
        _sglang_abort(manager, abort)
        return
    rids = {req.rid for req in manager.grammar_queue if abort.abort_all or req.rid.startswith(abort.rid)}
    gone = [req for req in manager.grammar_queue if req.rid in rids]
    manager.grammar_queue = [req for req in manager.grammar_queue if req.rid not in rids]
    for req in gone:
        _end(manager, req, abort)


def report_decode_stats(reporter: SchedulerMetricsReporter, *arguments: object, **named: object) -> None:
    """Report a decode step as SGLang does, and publish the KV events so far."""
    _sglang_report(reporter, *arguments, **named)
    reporter.scheduler.kv_events_publisher.publish_kv_events()


def emit_no_metrics(publisher: SchedulerKvEventsPublisher) -> None:
    """Send no counts of KV memory: routers have the engine's load from its host."""
    del publisher


def sleep_while_paused(scheduler: Scheduler) -> None:
    """Record the state of a paused scheduler, its load too, and sleep until a message comes, for a second at most."""
    _sglang_record_paused(scheduler)
    scheduler.publish_load_snapshot(force=True)
    scheduler.maybe_sleep_on_idle()


def name_no_adapter(names: KvEventLoraNames, extra_key: str | None) -> None:
    """Return no name of an adapter for a block, so that its hash has its tokens and its salt in it alone."""
    del names, extra_key


def _end(manager: GrammarManager, req: Req, abort: AbortReq) -> None:
    """End one request as `Scheduler.abort_request` ends a waiting one; its compiled grammar is dropped."""
    if isinstance(req.grammar, Future):
        req.grammar.cancel()  # unless a thread compiles it already
    scheduler = manager.scheduler
    scheduler._release_aborted_request(req)  # noqa: SLF001
    scheduler.beam_coordinator.retire_group(req)
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=abort.finished_reason), req)
