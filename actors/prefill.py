"""Prefill: compute prompts, and hand their KV caches to their decodes.

The engine moves the cache itself, and neither actor sees it. In a concurrent hand-off the request and its decode meet
at a rendezvous, which the router has made for both. The answer is one token, once the decode has the cache: the router
does not pass it on, since the decode streams it too. In a sequential one the answer is the state of the prompt. The
slot is then held until the router leaves the call, as it does once the decode has begun, or until the whole time of the
request is over. An engine is warm before it is offered here.

It bounds no prompts of its own, unlike a decode whose engine computes prompts. The decode has memory set aside for each
awaited prompt: a prompt held back here could keep memory from the prompts before it, and neither would go on. The
router, with both legs in view, gives a prefill no more for one decode than its share, and keeps the order of urgency
and turns; here calls are taken in the order of the inbox, as slots become free. KV memory is a bound only if the
engine's `admission` is set so. Each rank of an engine takes the calls for itself, as in `decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from actors.engines.slots.slots import Slots, generate, raise_when_lost
from actors.kit.calls import BugCounter
from actors.kit.priority_inbox import PriorityInbox
from protocol.messages.generation import Finished, Generate, Started, Tokens


async def prefill(
    inbox: PriorityInbox[Generate, Started | Tokens, Finished],
    ranks: Sequence[Slots],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Compute prompts, one in each slot of each of the engine's ranks, until its cache is at the decode.

    Raises `EngineDied` when the engine is lost, `EngineStuck` when it keeps slots of ended requests.
    """
    bugs, alone = BugCounter(), len(ranks) == 1
    async with trio.open_nursery() as requests:
        requests.start_soon(raise_when_lost, ranks[0].engine)
        for slots in ranks[1:]:
            requests.start_soon(_serve, inbox, slots, alone, bugs, requests)
        task_status.started()
        await _serve(inbox, ranks[0], alone, bugs, requests)


async def _serve(
    inbox: PriorityInbox[Generate, Started | Tokens, Finished],
    slots: Slots,
    alone: bool,
    bugs: BugCounter,
    requests: trio.Nursery,
) -> None:
    """Take the calls for one rank, which are a group of the inbox unless it is `alone`."""
    memory, group = slots.memory, None if alone else slots.rank
    recheck = partial(inbox.recheck, group)

    def fits(request: Generate) -> bool:
        return slots.in_service() and memory.fits(request)

    while True:
        await slots.free.acquire()
        call = await inbox.receive(fits, group)
        give_back: Callable[[], None] = memory.take(call.request, recheck)
        requests.start_soon(generate, call, slots, bugs, _ignore, give_back)


def _ignore() -> None:
    pass
