"""Decode: token ids to streams of further token ids, one engine slot a request.

It serves an engine that computes whole requests, and one that continues what a prefill has computed. It never knows
which: the engine takes the KV cache from the rendezvous that a request names. Its requests wait in the inbox and not in
the engine, where none could be overtaken: there the order is fixed. So it takes a call only when it has a slot for it
and, where its engine computes prompts too, when the prompts inside are few enough.
"""

from __future__ import annotations

from functools import partial

import trio

from actors.engines.slots import Slots, generate, raise_when_lost
from actors.kit.calls import BugCounter, Call
from actors.kit.pending_prefill import PendingPrefill
from actors.kit.priority_inbox import PriorityInbox
from protocol.messages import Finished, Generate, Started, Tokens


async def decode(
    inbox: PriorityInbox[Generate, Started | Tokens, Finished],
    slots: Slots,
    pending_prefill_tokens_max: int = 0,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve generations, one in each of the engine's slots; what it cannot take yet waits in the inbox.

    The prompts in the engine that have no first token come to at most `pending_prefill_tokens_max` tokens (0: no
    limit); a longer prompt is taken when none is pending. Several actors may share one inbox: the one with a free slot
    takes the next call. Raises `EngineDied` when the engine is lost, `EngineStuck` when it keeps slots whose requests
    have ended.
    """
    bugs, pending = BugCounter(), PendingPrefill(pending_prefill_tokens_max)

    def on_begun(call: Call[Generate, Started | Tokens, Finished]) -> None:
        if pending.discard(call):
            inbox.recheck()

    async with trio.open_nursery() as requests:
        requests.start_soon(raise_when_lost, slots.engine)
        task_status.started()
        while True:
            await slots.free.acquire()  # first, so that a call waits where others can take it
            call = await inbox.receive(lambda request: slots.in_service() and pending.fits(len(request.tokens)))
            pending.add(call, len(call.request.tokens))
            requests.start_soon(generate, call, slots, bugs, partial(on_begun, call))
