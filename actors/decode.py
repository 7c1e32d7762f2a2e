"""Decode: token ids to streams of further token ids, one engine slot a request.

It serves an engine of whole requests in the same way as a decode behind a prefill: the engine takes the KV cache by the
hand-off in the request. Requests wait in the inbox and not in the engine, where none could be overtaken: there the
order is fixed. So it takes a call only when it has a slot for it, the KV memory if that is bounded, and, where its
engine computes prompts too, when the prompts inside are few enough.

Each rank of an engine takes the calls for itself. Ranks are groups of the inbox, so a full or slow rank holds up no
call for another; an error of one rank ends all of them, since they are one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import trio

from actors.engines.slots.slots import Slots, from_the_start, generate, raise_when_lost
from actors.kit.calls import BugCounter, Call
from actors.kit.pending_prefill import PendingPrefill
from actors.kit.priority_inbox import PriorityInbox
from protocol.messages.generation import Finished, Generate, Started, Tokens


async def decode(
    inbox: PriorityInbox[Generate, Started | Tokens, Finished],
    ranks: Sequence[Slots],
    pending_prefill_tokens_max: int = 0,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve generations, one in each slot of each of the engine's ranks; further calls wait in the inbox.

    The pending prompts in a rank have at most `pending_prefill_tokens_max` tokens outside its cache (0: no limit); a
    longer prompt is taken when none is pending, and then does not count. Several actors may share one inbox: the one
    with a free slot takes the next call. Raises `EngineDied` when the engine is lost, `EngineStuck` when it keeps slots
    of ended requests.
    """
    bugs, alone = BugCounter(), len(ranks) == 1
    async with trio.open_nursery() as requests:
        requests.start_soon(raise_when_lost, ranks[0].engine)
        for slots in ranks[1:]:
            requests.start_soon(_serve, inbox, slots, alone, PendingPrefill(pending_prefill_tokens_max), bugs, requests)
        task_status.started()
        await _serve(inbox, ranks[0], alone, PendingPrefill(pending_prefill_tokens_max), bugs, requests)


async def _serve(
    inbox: PriorityInbox[Generate, Started | Tokens, Finished],
    slots: Slots,
    alone: bool,
    pending: PendingPrefill,
    bugs: BugCounter,
    requests: trio.Nursery,
) -> None:
    """Take the calls for one rank, which are a group of the inbox unless it is `alone`."""
    memory, group, ended_at = slots.memory, None if alone else slots.rank, -inf
    recheck = partial(inbox.recheck, group)

    def fits(request: Generate) -> bool:
        return slots.in_service() and pending.fits_behind_longer(request.uncached_tokens) and memory.fits(request)

    def longer_ended_at() -> float:
        """Return when the longer prompt ended, for the prompts queued behind it; now, while it has not."""
        return trio.current_time() if pending.has_longer else ended_at

    def on_begun(call: Call[Generate, Started | Tokens, Finished]) -> None:
        nonlocal ended_at
        if pending.discard(call):
            if pending.is_longer(call.request.uncached_tokens):
                ended_at = trio.current_time()
            recheck()

    while True:
        await slots.free.acquire()  # first, so that a call waits where others can take it
        call = await inbox.receive(fits, group, memory.may_begin)
        computable_from = longer_ended_at if pending.has_longer else from_the_start
        pending.add(call, call.request.uncached_tokens)
        give_back: Callable[[], None] = memory.take(call.request, recheck)
        requests.start_soon(generate, call, slots, bugs, partial(on_begun, call), give_back, computable_from)
