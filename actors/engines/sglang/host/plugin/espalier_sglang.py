"""Limits inside SGLang's scheduler, on every device: what one request's grammar may cost the requests beside it.

The grammar checker refuses expensive grammars beforehand, but it cannot try every answer. Here each step of each
grammar is timed in the scheduler itself, and a request whose steps exceed their budget is ended, alone; so is one whose
grammar allows no further token, of which there is nothing to draw. Compiled
grammars are kept within a number of bytes, and compiling has two threads that let the scheduler go first. SGLang finds
this file by its plugin entry point, because this folder is on the PYTHONPATH of hosts. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from time import thread_time

from actors.engines.sglang.boot_message import BYTES_MAX, GRAMMAR_FAILED, GRAMMAR_STEP_MS, GRAMMAR_TOO_SLOW
from actors.engines.sglang.host.grammar_walk import StepBudget

COMPILERS = 2
NICE = 10
QUOTING = ("base_grammar_backend", "grammar_manager", "xgrammar_backend")  # modules that log grammars
KEPT_MAX = 512  # compiled grammars in the cache, refused ones included


def activate():
    """Patch SGLang's grammars, if this process belongs to an engine of a node."""
    if GRAMMAR_STEP_MS not in os.environ:
        return
    from sglang.srt.constrained import xgrammar_backend
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

    free_dead_ends(xgrammar_backend.XGrammarGrammar)
    fail_dead_ends(Req, FINISH_ABORT)
    hide_grammars(xgrammar_backend.XGrammarGrammar)
    limit_steps(xgrammar_backend.XGrammarGrammar, float(os.environ[GRAMMAR_STEP_MS]) / 1000)
    limit_cache(BaseGrammarBackend, int(os.environ[BYTES_MAX]))
    limit_compiling(xgrammar_backend.XGrammarGrammarBackend, xgrammar_backend.GrammarCompiler)


def free_dead_ends(grammar):
    """Make a grammar that allows no token allow any for one step, and say so in its `dead_end`.

    If none were allowed, every score would be minus infinity, and to draw by such scores ends the whole scheduler.
    """
    fill, accept, undo = grammar.fill_vocab_mask, grammar.accept_token, grammar.rollback

    def fill_vocab_mask(self, vocab_mask, idx):
        fill(self, vocab_mask, idx)
        self.dead_end = not vocab_mask[idx].any()
        if self.dead_end:
            vocab_mask[idx] = -1  # 32 tokens a number, a bit each

    def accept_token(self, token):
        accept(self, token)
        self.dead_end = False

    def rollback(self, k):  # of tokens that were drafted, and not kept
        undo(self, k)
        self.dead_end = False

    grammar.dead_end = False
    grammar.fill_vocab_mask, grammar.accept_token, grammar.rollback = fill_vocab_mask, accept_token, rollback


def fail_dead_ends(request, abort):
    """Make a request fail in the step in which its grammar allows no token, whatever token that step has drawn.

    SGLang asks the grammar of a drawn token only after it has looked whether that token ends the answer, so the end of
    sequence, a stop, or the last of the tokens that were asked for would make the answer a whole one.
    """
    update = request.update_finish_state

    def update_finish_state(self, *args):
        grammar = getattr(self.grammar, "grammar", self.grammar)  # one that waits for the end of reasoning has another
        if getattr(grammar, "dead_end", False) and not self.to_finish:
            self.to_finish = abort(GRAMMAR_FAILED, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        update(self, *args)

    request.update_finish_state = update_finish_state


def hide_grammars(grammar):
    """Keep what clients send, and what they get, out of the host's log: SGLang quotes both where a grammar fails."""
    accept = grammar.accept_token

    def accept_token(self, token):
        try:
            accept(self, token)
        except ValueError:  # it quotes the grammar, and the ids of the answer
            raise ValueError("the grammar does not allow this token") from None

    grammar.accept_token = accept_token
    for module in QUOTING:
        logging.getLogger(f"sglang.srt.constrained.{module}").addFilter(_without_quotation)


def _without_quotation(record):
    if record.levelno >= logging.ERROR or "key_string" in str(record.msg):
        record.msg, record.args, record.exc_info = "a grammar was refused", (), None
    return True


def limit_steps(grammar, step_s, clock=thread_time):
    """Make `accept_token` raise the ValueError by which SGLang ends a request whose steps have taken too long."""
    accept, fill = grammar.accept_token, grammar.fill_vocab_mask

    def fill_vocab_mask(self, *args):
        began_at = clock()
        fill(self, *args)
        self._filled_s = clock() - began_at  # nobody catches what is raised here, so the next token ends the request

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
            raise ValueError(f"{GRAMMAR_TOO_SLOW}: one took {cost_s * 1000:.0f} ms, and {step_s * 1000:g} are allowed")

    grammar.fill_vocab_mask, grammar.accept_token = fill_vocab_mask, accept_token


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
