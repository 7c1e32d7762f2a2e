"""The responses of one WebSocket: one after the other in a lane, and in several lanes at the same time.

A lane is a name chosen by the client. It exists while one of its responses runs, waits or is kept in the history.

    lane   history   running   waiting, in the order of arrival
    a      a1        a2        a3, a4
    b      b1        -         b2, a fork of a2: its parent still runs
    c      -         c1        -

    create ──> waiting ──(lane free, place free, parent ended)──> running ──> history, if completed or cancelled
                  └──> dropped, if cancelled                         └──────> forgotten, if failed

The waiting requests of all lanes are one list. A pass over the list starts every request that can run, the oldest
first; an older request of a lane blocks the younger ones of the same lane, and no other lane. A pass runs in the turn
of the event loop in which a request comes, a response ends or a waiting request is dropped. Only a running response is
a task. Limits: `websocket_running_max` for the places, `websocket_queue_max` for the list, `websocket_lanes_max` for
the names.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import define, field

from protocol.dialects import responses
from protocol.dialects.targets import NO_TARGETS, Targets
from protocol.errors import (
    AskerLeft,
    Overloaded,
    SlowClient,
    StreamLimitReached,
)
from protocol.messages.generation import Usage
from protocol.trace import Trace
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.histories import Conversation
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.request_record import RequestRecord
from supervisor.gateway.websocket.lane_response import API, CREATE, LaneAnswers, LaneResponse

REQUEST_BYTES_FREE = 1024  # of each request, so that small ones are accepted when the budget is used up


@define(eq=False)
class _Waiting:
    """A request that waits for its lane, for a free place, or for its parent."""

    request: responses.Create
    memory: MemoryReservation
    # The conversation to be continued. It is kept here because the history may forget it before the request runs.
    previous: Conversation | None = None
    # The response to be continued, if it runs in another lane; None once it has ended.
    parent: LaneResponse | None = None


@define(eq=False, kw_only=True)
class Lanes:
    """All lanes of one connection."""

    gateway: Gateway
    answers: LaneAnswers
    caller: Trace | None  # where the client stood in a trace when it connected
    on_lost: Callable[[Exception], None]  # called when the client is gone, with the exception that shows it
    on_idle: Callable[[], None]  # called when nothing runs or waits any more
    tasks: trio.Nursery
    targets: Targets = NO_TARGETS  # of requests that name none
    _running: dict[str | None, LaneResponse] = field(factory=dict)  # by lane
    _waiting: list[_Waiting] = field(factory=list)  # in the order in which they came

    @property
    def busy(self) -> bool:
        """Whether any response runs or waits."""
        return bool(self._running or self._waiting)

    # Requests of the client -----------------------------------------------------------------

    def create(self, request: responses.Create, size_bytes: int) -> None:
        """Answer a request of `size_bytes` when its turn comes; raises `StreamLimitReached` or `Overloaded`."""
        limits, lane, continued = self.gateway.limits, request.stream_id, request.previous_response_id
        # A lane without history, running and waiting responses has ended, and its name is free for another one.
        waiting_lanes = (waiting.request.stream_id for waiting in self._waiting)
        lanes = {*self._running, *waiting_lanes, *self.answers.history.lanes} - {None}
        if lane is not None and lane not in lanes and len(lanes) >= limits.websocket_lanes_max:
            raise StreamLimitReached(f"this connection has {len(lanes)} lanes, as many as it may", param="stream_id")
        memory = self.gateway.memory.bodies.reserve(self.gateway.memory_owner(self.answers.key), REQUEST_BYTES_FREE)
        memory.grow(size_bytes)
        waiting = _Waiting(request, memory)
        # A fork of another lane's response waits for its parent; a request of the same lane waits behind it anyway.
        if continued is not None and self.answers.history.find_in(lane, continued) is None:
            waiting.previous = self.answers.history.find(continued)
            others = (running for running in self._running.values() if running.request.stream_id != lane)
            waiting.parent = next((running for running in others if running.events.id == continued), None)
        # The limit is checked after the pass: a request that can start at once needs no place in the list.
        self._waiting.append(waiting)
        self._start_waiting()
        if len(self._waiting) > limits.websocket_queue_max and self._waiting[-1] is waiting:
            self._waiting.pop()
            memory.release()
            raise Overloaded(f"{len(self._waiting)} responses wait for their turn on this connection")

    def cancel(self, event: responses.CancelResponse) -> None:
        """End the response named by the event; cancelling an ended response does nothing.

        Without an id it is the running response of that lane, or else the first waiting one.
        """
        if (running := self._named(event)) is not None:
            self.gateway.runner.abort(running.record, AskerLeft("the client sent response.cancel"))
            return
        # A waiting request has no id yet.
        if event.response_id is None:
            waiting = (waiting for waiting in self._waiting if waiting.request.stream_id == event.stream_id)
            if (first := next(waiting, None)) is not None:
                self._drop(first)

    def cancels_running(self, event: responses.Create | responses.CancelResponse) -> bool:
        """Whether an event ends a running response, and so may overtake others."""
        return isinstance(event, responses.CancelResponse) and self._named(event) is not None

    def forget(self, lane: str | None, response_id: str | None) -> None:
        """Forget a response that a failed request of the same lane was to continue, as OpenAI's server does."""
        self.answers.history.evict(lane, response_id)

    def close(self) -> None:
        """Give back all memory, at the end of the connection."""
        for memory in (*(each.memory for each in self._waiting), *(each.memory for each in self._running.values())):
            memory.release()
        self.answers.history.clear()

    def _named(self, event: responses.CancelResponse) -> LaneResponse | None:
        for running in self._running.values():
            in_lane = event.stream_id == running.request.stream_id
            if running.events.id == event.response_id:
                named = in_lane or event.stream_id is None
            else:
                named = in_lane and event.response_id is None
            if named:
                return running
        return None

    def _drop(self, waiting: _Waiting) -> None:
        """End a response that never ran."""
        self._waiting.remove(waiting)
        waiting.memory.release()
        response_id = self.gateway.runtime.new_id()
        events = self.answers.events_of(waiting.request, response_id)
        self.answers.send(*events.begin(), *events.cancelled(Usage(0, 0)))
        left = AskerLeft("the client sent response.cancel")
        self.answers.log_refused(
            left, f"{self.answers.request_id}/{response_id}", self.gateway.runtime.next_span(self.caller)
        )
        self._start_waiting()
        self._check_idle()

    # Turns of the lanes -----------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Start every request that can run now, the oldest first."""
        # Every lane seen so far, so that an older request of a lane blocks the younger ones.
        taken = set(self._running)
        for waiting in tuple(self._waiting):
            if len(self._running) >= self.gateway.limits.websocket_running_max:
                break
            lane = waiting.request.stream_id
            if lane not in taken and waiting.parent is None:
                self._waiting.remove(waiting)
                self._start(waiting)
            taken.add(lane)

    def _start(self, waiting: _Waiting) -> None:
        request, response_id = waiting.request, self.gateway.runtime.new_id()
        record = RequestRecord(
            f"{self.answers.request_id}/{response_id}",
            request.model,
            API,
            trio.current_time(),
            key=self.answers.key,
            request_line=CREATE,
            trace=self.gateway.runtime.next_span(self.caller),
            targets=self.targets,
            settles=False,
        )
        events = self.answers.events_of(request, response_id)
        running = LaneResponse(request, response_id, events, record, waiting.previous, waiting.memory)
        self._running[request.stream_id] = running
        self.tasks.start_soon(self._run, running, name=f"response {response_id}")

    async def _run(self, running: LaneResponse) -> None:
        """Answer one request, and start the requests that waited for it, unless the client is gone."""
        complete = False
        try:
            await self.answers.answer(running)
            complete = True
            self._ended(running)
        except (SlowClient, trio.BrokenResourceError) as error:
            self.on_lost(error)
        finally:
            self.answers.log_when_sent(running.record, complete=complete)

    def _ended(self, running: LaneResponse) -> None:
        del self._running[running.request.stream_id]
        running.memory.release()
        for waiting in self._waiting:
            if waiting.parent is running:
                waiting.parent, waiting.previous = None, self.answers.history.find(running.events.id)
        self._start_waiting()
        self._check_idle()

    def _check_idle(self) -> None:
        if not self.busy:
            self.on_idle()
