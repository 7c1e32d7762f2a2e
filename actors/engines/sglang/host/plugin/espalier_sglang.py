"""Limits inside SGLang's scheduler, on every device: what one request's grammar may cost the requests beside it.

The grammar checker refuses expensive grammars beforehand, but it cannot try every answer. Here each step of each
grammar is timed in the scheduler itself, and a request whose steps exceed their budget is aborted, alone; so is one
whose grammar allows no further token, of which there is nothing to draw. An engine may have several ranks, and a
request must end on all of them in the same step, or they wait for each other for ever: it fails by what every rank
knows of it, its tokens and its grammar, or by an abort that the first rank sends to all.

Compiled grammars are kept within a number of bytes, and compiling has two threads that let the scheduler go first.
SGLang finds this file by its plugin entry point, because this folder is on the PYTHONPATH of hosts. Written for
SGLang 0.5.23.
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
from actors.engines.sglang.host.grammar_walk import StepBudget

COMPILERS = 2
NICE = 10
KEPT_MAX = 512  # compiled grammars in the cache, refused ones included
GRAMMAR_LOGGERS = tuple(
    f"sglang.srt.constrained.{module}" for module in ("base_grammar_backend", "grammar_manager", "xgrammar_backend")
)
ANSWER_LOGGERS = (
    "sglang.srt.managers.scheduler_components.batch_result_processor",
    "sglang.srt.speculative.spec_utils",
)
QUOTING = ("key_string", "Grammar accept_token failed", "with grammar: ")  # what is in a message that quotes a client


def activate():
    """Patch SGLang's grammars, if this process belongs to an engine of a node, and end the process if that fails.

    SGLang would log any other exception, and serve without the limits.
    """
    if GRAMMAR_STEP_MS not in os.environ:
        return
    try:
        _activate(float(os.environ[GRAMMAR_STEP_MS]) / 1000, int(os.environ[BYTES_MAX]))
    except Exception as error:
        raise SystemExit(f"the limits of grammars do not fit this version of SGLang: {error!r}") from error


def _activate(step_s, bytes_max):
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, XGrammarGrammar, XGrammarGrammarBackend
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
    from sglang.srt.managers.scheduler import Scheduler

    slow = WeakSet()
    free_dead_ends(XGrammarGrammar)
    fail_dead_ends(Req, FINISH_ABORT)
    hide_grammars(XGrammarGrammar)
    limit_steps(XGrammarGrammar, step_s, slow)
    abort_slow(Scheduler, AbortReq, slow)
    limit_cache(BaseGrammarBackend, bytes_max)
    limit_compiling(XGrammarGrammarBackend, GrammarCompiler)


def free_dead_ends(grammar):
    """Make every token drawable where a grammar allows none; `fail_dead_ends` ends the answer, whatever is drawn.

    If none were, every score would be minus infinity, and to draw by such scores ends the whole scheduler. Rows are
    opened on the way to the scores, not before: what traverses drafted tokens accepts those that a row allows.
    """
    apply = grammar.apply_vocab_mask

    def apply_vocab_mask(self, logits, vocab_mask):  # int32 [rows, vocabulary / 32], a bit a token
        vocab_mask.masked_fill_((vocab_mask == 0).all(-1, keepdim=True), -1)
        apply(self, logits=logits, vocab_mask=vocab_mask)

    grammar.apply_vocab_mask = apply_vocab_mask


def fail_dead_ends(request, abort):
    """Make a request fail in the step that has drawn a token which its grammar does not allow.

    SGLang asks the grammar of a drawn token only after it has looked whether that token ends the answer, so the end of
    sequence, a stop, or the last of the tokens that were asked for would make the answer a whole one. Drafted tokens it
    asks for before.
    """
    update = request.update_finish_state

    def update_finish_state(self, new_accepted_len=1):
        if not self.to_finish and _is_refused(self.grammar, self.output_ids):
            self.to_finish = abort(GRAMMAR_FAILED, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        update(self, new_accepted_len)

    request.update_finish_state = update_finish_state


def _is_refused(grammar, output_ids):
    """Whether a grammar has not been asked of the last token yet, and does not allow it."""
    accepted = getattr(
        grammar, "accepted_tokens", None
    )  # no grammar has none, and one that waits for the end of thoughts
    if accepted is None or len(output_ids) != len(accepted) + 1 or grammar.is_terminated():
        return False
    if not grammar.matcher.accept_token(output_ids[-1]):
        return True
    grammar.matcher.rollback(1)
    return False


def hide_grammars(grammar):
    """Keep what clients send, and what they get, out of the host's log: SGLang quotes both where a grammar fails."""
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
    if fails or any(each in str(record.msg) for each in QUOTING):
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

    The clocks of ranks differ, so those of the others decide nothing.
    """
    poll = scheduler._poll_timeout_aborts

    def poll_timeout_aborts(self):
        aborts = poll(self)
        if slow:
            requests = [each for each in self.collect_inflight_reqs() if each.grammar in slow and not each.finished()]
            aborts += [abort(rid=each.rid, abort_message=each.grammar.too_slow) for each in requests]
            slow.clear()
        return aborts

    scheduler._poll_timeout_aborts = poll_timeout_aborts


def limit_cache(backend, bytes_max):
    """Keep compiled grammars within `bytes_max`; those that were used longest ago are dropped first."""
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
