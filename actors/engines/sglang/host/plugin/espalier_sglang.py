"""Limits inside SGLang's processes, on every device: what one request's grammar may cost the requests beside it.

The grammar checker refuses expensive grammars beforehand, but it cannot try every answer. Here each step of each
grammar is timed in the scheduler itself, and a request whose steps exceed their budget is aborted, alone; so is one
whose grammar allows no further token. An engine may have several ranks, and a request must end on all of them in the
same step, or they wait for each other for ever: it fails by state common to all ranks, its tokens and its grammar, or
by an abort from the first rank to all.

Compiled grammars are kept within a number of bytes, and compiling has two threads that let the scheduler go first. An
engine with data-parallel ranks has one process more, which must not poll while there are no requests. SGLang finds this
file by its plugin entry point, because this folder is on the PYTHONPATH of hosts. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from time import thread_time
from weakref import WeakSet

from actors.engines.sglang.boot_message import BYTES_MAX, GRAMMAR_FAILED, GRAMMAR_STEP_MS, GRAMMAR_TOO_SLOW
from actors.engines.sglang.host.grammars.grammar_walk import StepBudget
from actors.engines.sglang.host.plugin.espalier_priorities import order_by_priority

COMPILERS = 2
NICE = 10
IDLE_MS = 1000  # the period in which an idle process feeds SGLang's watchdog
KEPT_MAX = 512  # compiled grammars in the cache, refused ones included
GRAMMAR_LOGGERS = tuple(
    f"sglang.srt.constrained.{module}" for module in ("base_grammar_backend", "grammar_manager", "xgrammar_backend")
)
ANSWER_LOGGERS = (
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.managers.scheduler_components.batch_result_processor",
    "sglang.srt.speculative.spec_utils",
)
QUOTING = ("key_string", "grammar_key", "Grammar accept_token failed", "Failed to compile", "with grammar: ")
"""The marks of a message that quotes a client's grammar, or the token ids of an answer."""

active = False
"""Whether the limits hold in this process; its host checks it: SGLang serves without a plugin that fails to load."""


def activate():
    """Patch SGLang's grammars, if this process belongs to an engine of a node, and end the process if that fails.

    SGLang would log any other exception, and serve without the limits.
    """
    global active  # noqa: PLW0603  # one a process, like the patches
    if GRAMMAR_STEP_MS not in os.environ:
        return
    try:
        _activate(float(os.environ[GRAMMAR_STEP_MS]) / 1000, int(os.environ[BYTES_MAX]))
    except Exception as error:
        raise SystemExit(f"the limits of grammars do not fit this version of SGLang: {error!r}") from error
    active = True


def _activate(step_s, bytes_max):
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, XGrammarGrammar, XGrammarGrammarBackend
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.io_struct import AbortReq, sock_recv
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    slow = WeakSet()
    free_dead_ends(XGrammarGrammar)
    fail_dead_ends(Req, SchedulerBatchResultProcessor, FINISH_ABORT)
    hide_grammars(XGrammarGrammar)
    limit_steps(XGrammarGrammar, step_s, slow)
    abort_slow(Scheduler, AbortReq, slow)
    limit_cache(BaseGrammarBackend, bytes_max)
    limit_compiling(XGrammarGrammarBackend, GrammarCompiler)
    wait_for_requests(DataParallelController, sock_recv)
    order_by_priority(Scheduler, PrefillAdder, ScheduleBatch, AddReqResult.NO_TOKEN)


def wait_for_requests(controller, receive):
    """Make the controller of data-parallel ranks wait for requests: SGLang's polls all the time."""

    def event_loop(self):
        while True:
            self.soft_watchdog.feed()
            if self.recv_from_tokenizer.poll(IDLE_MS):
                self._request_dispatcher(receive(self.recv_from_tokenizer))

    controller.event_loop = event_loop


def free_dead_ends(grammar):
    """Make every token drawable where a grammar allows none; `fail_dead_ends` then ends the answer at any token.

    If none were, every score would be minus infinity, and to draw by such scores ends the whole scheduler. Rows are
    opened on the way to the scores, not before: the check of drafted tokens accepts all that a row allows.
    """
    apply = grammar.apply_vocab_mask

    def apply_vocab_mask(self, logits, vocab_mask):  # int32 [rows, vocabulary / 32], a bit a token
        vocab_mask.masked_fill_((vocab_mask == 0).all(-1, keepdim=True), -1)
        apply(self, logits=logits, vocab_mask=vocab_mask)

    grammar.apply_vocab_mask = apply_vocab_mask


def fail_dead_ends(request, processor, abort):
    """Make a request fail in the step that draws a token against its grammar.

    SGLang checks whether a drawn token ends the answer before it asks the grammar, so a forbidden end of sequence,
    stop, or last token would make the answer a whole one. Here the grammar is asked first, and not again. For drafted
    tokens SGLang itself asks it first.
    """
    update = request.update_finish_state
    accept, accept_first = processor._accept_grammar_tokens, processor._apply_prefill_grammar

    def update_finish_state(self, new_accepted_len=1):
        if new_accepted_len and not self.to_finish and _has_unasked_token(self):
            try:
                self.grammar.accept_token(self.output_ids[-1])
                self.asked_tokens = len(self.output_ids)
            except ValueError:
                self.to_finish = abort(GRAMMAR_FAILED, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        update(self, new_accepted_len)

    def _accept_grammar_tokens(self, req, tokens):
        return tokens if _was_asked(req) else accept(self, req, tokens)

    def _apply_prefill_grammar(self, *, req, next_token_id, already_advanced=False):
        already_advanced = already_advanced or _was_asked(req)
        accept_first(self, req=req, next_token_id=next_token_id, already_advanced=already_advanced)

    request.asked_tokens = 0
    request.update_finish_state = update_finish_state
    processor._accept_grammar_tokens, processor._apply_prefill_grammar = _accept_grammar_tokens, _apply_prefill_grammar


def _has_unasked_token(req):
    """Whether the grammar of a request, if it has one, has been asked of all tokens but the last.

    An id outside the vocabulary comes of NaN scores, for which SGLang has an error of its own.
    """
    accepted = getattr(req.grammar, "accepted_tokens", None)
    if accepted is None or len(req.output_ids) != len(accepted) + 1 or req.grammar.is_terminated():
        return False
    return 0 <= req.output_ids[-1] < req.grammar.vocab_size


def _was_asked(req):
    """Whether the grammar was asked of the last token ahead of SGLang; true once, as drafted tokens may follow."""
    asked, req.asked_tokens = req.asked_tokens, 0
    return 0 < asked == len(req.output_ids)


def hide_grammars(grammar):
    """Keep grammars and answers of clients out of the host's log: SGLang quotes both where a grammar fails."""
    accept = grammar.accept_token

    def accept_token(self, token):
        try:
            accept(self, token)
        except ValueError:  # it quotes the grammar, and the ids of the answer
            raise ValueError("the grammar does not allow this token") from None

    grammar.accept_token = accept_token
    for name in (*GRAMMAR_LOGGERS, *ANSWER_LOGGERS):
        logging.getLogger(name).addFilter(_without_quotation)


def _without_quotation(record):
    fails = record.levelno >= logging.ERROR and record.name in GRAMMAR_LOGGERS
    if fails or any(mark in str(record.msg) for mark in QUOTING):
        record.msg, record.args, record.exc_info = "a grammar was refused", (), None
    return True


def limit_steps(grammar, step_s, slow, clock=thread_time):
    """Time each step of each grammar; one whose steps have taken too long is put into `slow`, and has a reason."""
    accept, fill = grammar.accept_token, grammar.fill_vocab_mask

    def fill_vocab_mask(self, *args):
        began_at = clock()
        fill(self, *args)
        self._filled_s = clock() - began_at

    def accept_token(self, token):
        began_at = clock()
        accept(self, token)
        cost_s = clock() - began_at + getattr(self, "_filled_s", 0.0)
        self._filled_s = 0.0
        if cost_s <= step_s:
            return
        if not hasattr(self, "_budget"):
            self._budget = StepBudget(step_s)
        if not self._budget.spend(cost_s):
            allowed = f"one took {cost_s * 1000:.0f} ms, and {step_s * 1000:g} are allowed"
            self.too_slow = f"{GRAMMAR_TOO_SLOW}: {allowed}"
            slow.add(self)

    grammar.fill_vocab_mask, grammar.accept_token = fill_vocab_mask, accept_token


def abort_slow(scheduler, abort, slow):
    """Make the first rank abort the requests whose grammars are in `slow`, on all ranks, as it does after a timeout.

    The clocks of ranks differ, so the other ranks' decide nothing. A prefill aborts none: it draws one token, and an
    abort would break off the hand-off of the cache.
    """
    poll = scheduler._poll_timeout_aborts

    def poll_timeout_aborts(self):
        aborts = poll(self)
        if slow and self.disaggregation_mode.value != "prefill":
            for req in self.collect_inflight_reqs():
                if req.grammar in slow and req.to_finish is None and not req.finished():
                    why = req.grammar.too_slow
                    reason = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": why}
                    aborts.append(abort(rid=req.rid, abort_message=why, finished_reason=reason))
        return aborts

    scheduler._poll_timeout_aborts = poll_timeout_aborts


def limit_cache(backend, bytes_max):
    """Keep compiled grammars within `bytes_max`; the least recently used are dropped first."""
    get = backend.get_cached_or_future_value

    def get_cached_or_future_value(self, key, *args):
        if key in self.cache:
            self.cache[key] = self.cache.pop(key)  # a dict keeps the order in which its keys came
        return get(self, key, *args)

    def set_cache(self, key, value):
        self.cache.pop(key, None)
        self.cache[key] = value
        while len(self.cache) > KEPT_MAX or sum(map(_size, self.cache.values())) > bytes_max:
            del self.cache[next(iter(self.cache))]

    backend.get_cached_or_future_value, backend.set_cache = get_cached_or_future_value, set_cache


def limit_compiling(backend, compiler):
    """Let a few threads compile, at a lower priority than the scheduler's; the only cache is that of `limit_cache`."""
    init = backend.__init__

    def initialized(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.executor.shutdown()
        self.executor = ThreadPoolExecutor(COMPILERS, "grammar", initializer=_give_way)
        self.grammar_compiler = compiler(self._tokenizer_info, max_threads=1, cache_enabled=False)

    backend.__init__ = initialized


def _size(grammar):
    context = getattr(grammar, "ctx", None)
    return 1024 if context is None else context.memory_size_bytes


def _give_way():
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
