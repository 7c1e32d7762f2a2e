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
from attrs import define

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
            requests.start_soon(_serve, inbox, slots, alone, pending_prefill_tokens_max, bugs, requests)
        task_status.started()
        await _serve(inbox, ranks[0], alone, pending_prefill_tokens_max, bugs, requests)


@define(eq=False)
class _Prompts:
    """Prompts that a rank computes before a further one, and when the last longer one of them ended."""

    pending: PendingPrefill
    _longer_ended_at: float = -inf

    def fits(self, request: Generate) -> bool:
        return self.pending.fits_behind_longer(request.uncached_tokens)

    def discard(self, call: Call[Generate, Started | Tokens, Finished]) -> bool:
        """Remove a prompt, if it is pending; return whether it was."""
        was_pending = self.pending.discard(call)
        if was_pending and self.pending.is_longer(call.request.uncached_tokens):
            self._longer_ended_at = trio.current_time()
        return was_pending

    def longer_ended_at(self) -> float:
        """Return when the longer prompt ended, for the prompts queued behind it; now, while it has not."""
        return trio.current_time() if self.pending.has_longer else self._longer_ended_at


async def _serve(
    inbox: PriorityInbox[Generate, Started | Tokens, Finished],
    slots: Slots,
    alone: bool,
    pending_prefill_tokens_max: int,
    bugs: BugCounter,
    requests: trio.Nursery,
) -> None:
    """Take the calls for one rank, which are a group of the inbox unless it is `alone`."""
    memory, group = slots.memory, None if alone else slots.rank
    recheck = partial(inbox.recheck, group)
    # A prompt that gives way in the engine may wait for memory there, and holds up none that does not.
    all_prompts, first_prompts = (_Prompts(PendingPrefill(pending_prefill_tokens_max)) for _ in range(2))

    def may_begin(request: Generate) -> bool:
        return memory.may_begin(request) and (not memory.is_behind(request) or all_prompts.fits(request))

    def fits(request: Generate) -> bool:
        prompts = all_prompts if memory.is_behind(request) else first_prompts
        return slots.in_service() and prompts.fits(request) and memory.fits(request)

    def on_begun(call: Call[Generate, Started | Tokens, Finished]) -> None:
        was_first = first_prompts.discard(call)
        if all_prompts.discard(call) or was_first:
            recheck()

    while True:
        await slots.free.acquire()  # first, so that a call waits where others can take it
        call = await inbox.receive(fits, group, may_begin)
        prompts = (all_prompts,) if memory.is_behind(call.request) else (first_prompts, all_prompts)
        computable_from = prompts[0].longer_ended_at if prompts[0].pending.has_longer else from_the_start
        for each in prompts:
            each.pending.add(call, call.request.uncached_tokens)
        give_back: Callable[[], None] = memory.take(call.request, recheck)
        requests.start_soon(generate, call, slots, bugs, partial(on_begun, call), give_back, computable_from)
