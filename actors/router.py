"""Router: requests of a model to its workers, and on to another worker when one is lost.

It stands between the processor and the workers of all nodes, and is the only actor with an address of more than one of
them. A request waits in its inbox, the most urgent first, until some worker of its pool has room; then the policy
chooses. From then on the request has a task of its own (`RoutedRequest`); one more task moves requests that wait at the
wrong worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from actors.kit.calls import BugCounter, Call
from actors.kit.direct import Answerer, DirectCalls
from actors.kit.priority_inbox import PriorityInbox
from actors.routing.rebalancing import UnstartedRequests
from actors.routing.route import Route
from actors.routing.routed_request import RoutedRequest
from actors.routing.routing import Routing
from protocol.messages.generation import Finished, Generate, Started, Tokens


async def router(
    inbox: PriorityInbox[Generate, Started | Tokens, Finished],
    routing: Routing,
    direct: DirectCalls[Generate, Started | Tokens, Finished] | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Route each call, a direct one at once; the others stay in the inbox while all workers of their pools are full.

    The calls of an owner that leaves too few slots to others stay there, too, and calls of others pass them.
    """
    bugs, unstarted, refused = BugCounter(), UnstartedRequests(), trio.lowlevel.ParkingLot()
    direct = direct or DirectCalls()

    async def route_one(call: Call[Generate, Started | Tokens, Finished], route: Route | None) -> None:
        with call.answering(bugs) as answer:
            answer.end(await RoutedRequest(call.request, answer, routing, unstarted).run(route))

    def begin(request: Generate) -> Answerer[Generate, Started | Tokens, Finished] | None:
        route = routing.choose_first(request)
        return None if route is None else partial(route_one, route=route)

    def looking_again(allows: Callable[[Generate], bool], request: Generate) -> bool:
        if allows(request):
            return True
        refused.unpark_all()
        return False

    async def look_again() -> None:
        """Have the waiting calls looked at after each change of the workers."""
        while True:
            # Also at first: calls may have come, and been refused, before this task began. They are looked at once the
            # next wait has begun, so that no change is missed, and a turn later than calls whose answer has begun.
            while any(inbox.waiting):
                inbox.recheck()
                await routing.wait_changed()
                await trio.lowlevel.checkpoint()
            await refused.park()

    async with trio.open_nursery() as requests, direct.answered(begin, requests):
        requests.start_soon(unstarted.move_on, routing)
        requests.start_soon(look_again)
        task_status.started()
        has_room, may_begin = (partial(looking_again, allows) for allows in (routing.has_room, routing.may_begin))
        while True:
            call = await inbox.receive(has_room, may_begin=may_begin)  # a call that must wait does so in the inbox
            requests.start_soon(route_one, call, routing.choose(call.request))
