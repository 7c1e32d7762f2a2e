"""The terms of SGLang's hand-offs: what a decode's scheduler compares with its prefill at their first meeting.

A difference ends the decode, with all of its requests. So each scheduler reports its terms at its start, and no router
pairs two legs that differ. Sizes of attention groups are terms only for the caches that SGLang cannot reshape. Written
for SGLang 0.5.23 (`CommonKVManager.try_ensure_parallel_info`); called in the scheduler's process.
"""

from __future__ import annotations

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.managers.scheduler import Scheduler

HAND_OFF_TERMS = "espalier_hand_off_terms"
"""The key of the terms in what a scheduler reports at its start."""

RIGID_STATES = (StateType.MINIMAX_INDEX_K, StateType.BLOCK_SCALE, StateType.BLOCK_SCALE_SWA)

_sglang_init_info = Scheduler.get_init_info


def report() -> None:
    """Have the scheduler of this process report its terms; to be called once."""
    Scheduler.get_init_info = _init_info


def _init_info(scheduler: Scheduler) -> dict[str, object]:
    return {**_sglang_init_info(scheduler), HAND_OFF_TERMS: terms(scheduler)}


def terms(scheduler: Scheduler) -> dict[str, str]:
    """Return the terms of a scheduler by name; none if it computes both legs."""
    queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
    manager = getattr(queue, "kv_manager", None)
    if manager is None:
        return {}
    states = {*getattr(manager.kv_args, "state_types", ())}
    found = {
        "kv_cache_dtype": manager.kv_cache_dtype_str,
        "kv_layout": manager.kv_layout,
        "layout of drafts": manager.dsv41_spec_layout,
        "attention tp size": None if states.isdisjoint(RIGID_STATES) else manager.attn_tp_size,
    }
    return {name: str(value) for name, value in found.items() if value is not None}
