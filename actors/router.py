"""Router: requests of a model to its workers, and on to another worker when one is lost.

It stands between the processor and the workers of all nodes, and is the only actor that knows of more than one of them.
A request waits in its inbox, where the most urgent is next, until some worker has room; then the policy chooses. From
then on the request is on its own (`RoutedRequest`), beside a task that moves those that wait at the wrong worker.
"""

from __future__ import annotations

from functools import partial

import trio

from actors.kit.calls import BugCounter, Call, Inbox
from actors.kit.direct import Answerer, DirectCalls
from actors.routing.rebalancing import UnstartedRequests
from actors.routing.route import Route
from actors.routing.routed_request import RoutedRequest
from actors.routing.routing import Routing
from protocol.messages import Finished, Generate, Started, Tokens


async def router(
    inbox: Inbox[Call[Generate, Started | Tokens, Finished]],
    routing: Routing,
    direct: DirectCalls[Generate, Started | Tokens, Finished] | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Route each call, a direct one at once; the others stay in the inbox while all workers are full."""
    bugs, unstarted = BugCounter(), UnstartedRequests()
    direct, receiving = direct or DirectCalls(), trio.CancelScope()

    async def route_one(call: Call[Generate, Started | Tokens, Finished], route: Route | None) -> None:
        with call.answering(bugs) as answer:
            answer.end(await RoutedRequest(call.request, answer, routing, unstarted).run(route))

    def begin(request: Generate) -> Answerer[Generate, Started | Tokens, Finished] | None:
        if (route := routing.choose_next(request)) is not None:
            return partial(route_one, route=route)
        receiving.cancel(reason="there is no room")
        return None

    async with trio.open_nursery() as requests, direct.answered(begin, requests):
        requests.start_soon(unstarted.move_on, routing)
        task_status.started()
        while True:
            await routing.wait_room()  # a call that must wait does so in the inbox
            with trio.CancelScope() as receiving:
                call = await inbox.receive()
                requests.start_soon(route_one, call, routing.choose_next(call.request))
