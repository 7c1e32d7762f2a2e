"""The responses of one WebSocket: one after the other in a lane, lanes beside each other, and what continues what.

A response that runs is a task; a lane that does nothing is none. A lane is there while something of it runs, waits or
is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import trio
from attrs import define, field

from actors.processor import TextReply
from protocol.dialects import responses
from protocol.errors import (
    AskerLeft,
    ConnectionExpired,
    Overloaded,
    PreviousResponseNotFound,
    RequestError,
    SlowClient,
    StreamLimitReached,
)
from protocol.messages import FinishReason, Started, Usage
from protocol.text_messages import Accepted, Answered, ChoiceEnded, Role, Text, Turn
from protocol.trace import Trace, child_span
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import Key
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.requests import RequestRecord, internal_error
from supervisor.gateway.websocket.history import Memory, Said

WHAT = "response.create"
REQUEST_BYTES_FREE = 1024  # of each request, so that small ones are heard whatever else is kept


class Say(Protocol):
    """Writes events to the client."""

    def __call__(self, *events: bytes) -> int:
        """Write them, whole and in order, and return how many bytes those were.

        Raises `SlowClient` or `trio.BrokenResourceError`.
        """


@define(eq=False)
class _Running:
    """A response that is being answered."""

    create: responses.Create
    id: str  # ours
    events: responses.Events
    counted: RequestRecord
    before: Said | None
    held: MemoryReservation  # the memory of what was asked
    begun: bool = False  # its client knows its id
    ended: ChoiceEnded = ChoiceEnded(FinishReason.STOP)  # until its choice says how; that of a warm-up does, too


@define(eq=False)
class _Waiting:
    """A request that waits for its lane, for room, or for the response that it forks from."""

    create: responses.Create
    held: MemoryReservation
    before: Said | None = None  # what it forks from, which may be forgotten before its turn comes
    parent: _Running | None = None  # what it forks from, until that has ended


@define(eq=False)
class Lanes:
    """All lanes of one connection; `say` writes events to the client, and `lost` hears why that failed."""

    door: Gateway
    key: Key | None
    request_id: str  # of the connection
    caller: Trace | None  # whom every response over it is for
    expires_at: float
    say: Say
    lost: Callable[[Exception], None]
    at_rest: Callable[[], None]  # called when nothing runs or waits any more
    tasks: trio.Nursery
    outbox: Outbox  # where what is said goes
    _memory: Memory = field(init=False)
    _running: dict[str | None, _Running] = field(factory=dict)  # by lane
    _waiting: list[_Waiting] = field(factory=list)  # in the order in which they came

    def __attrs_post_init__(self) -> None:
        most, owner = self.door.limits.history_bytes_max, "" if self.key is None else self.key.name
        self._memory = Memory(most, self.door.histories, owner)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._running or self._waiting)

    # What the client says -------------------------------------------------------------------

    def hear(self, create: responses.Create, size_bytes: int) -> None:
        """Answer a request of so many bytes when its turn comes; raises `StreamLimitReached` or `Overloaded`."""
        limits, lane, wanted = self.door.limits, create.stream_id, create.previous_response_id
        named = {*self._running, *(each.create.stream_id for each in self._waiting), *self._memory.lanes} - {None}
        if lane is not None and lane not in named and len(named) >= limits.websocket_lanes_max:
            raise StreamLimitReached(f"this connection has {len(named)} lanes, as many as it may", param="stream_id")
        held = self.door.bodies.hold(self.door.memory_owner(self.key), REQUEST_BYTES_FREE)
        held.grow(size_bytes)
        waiting = _Waiting(create, held)
        if wanted is not None and self._memory.find_in(lane, wanted) is None:
            waiting.before = self._memory.find(wanted)
            others = (each for each in self._running.values() if each.create.stream_id != lane)
            waiting.parent = next((each for each in others if each.events.id == wanted), None)
        self._waiting.append(waiting)
        self._advance()
        if len(self._waiting) > limits.websocket_queue_max and self._waiting[-1] is waiting:
            self._waiting.pop()
            held.release()
            raise Overloaded(f"{len(self._waiting)} responses wait for their turn on this connection")

    def cancel(self, event: responses.CancelResponse) -> None:
        """End the response that the event names; one that has ended already is nobody's mistake.

        Without an id it is whatever runs in that lane, or else waits there first.
        """
        if (running := self._named(event)) is not None:
            self.door.asking.cut(running.counted, AskerLeft("the client sent response.cancel"))
            return
        if event.response_id is None:  # one that waits has no id yet
            waiting = (each for each in self._waiting if each.create.stream_id == event.stream_id)
            if (first := next(waiting, None)) is not None:
                self._drop(first)

    def cancels(self, event: responses.Create | responses.CancelResponse) -> bool:
        """Whether an event ends something that runs, whatever the client has said before it."""
        return isinstance(event, responses.CancelResponse) and self._named(event) is not None

    def _named(self, event: responses.CancelResponse) -> _Running | None:
        for running in self._running.values():
            in_lane = event.stream_id == running.create.stream_id
            if running.events.id == event.response_id:
                named = in_lane or event.stream_id is None
            else:
                named = in_lane and event.response_id is None
            if named:
                return running
        return None

    def close(self) -> None:
        """Give back all memory: the connection has ended."""
        for held in (*(each.held for each in self._waiting), *(each.held for each in self._running.values())):
            held.release()
        self._memory.clear()

    def forget(self, lane: str | None, response_id: str | None) -> None:
        """Forget a response that was to be continued in its own lane by something that failed."""
        self._memory.evict(lane, response_id)

    def _drop(self, waiting: _Waiting) -> None:
        """End a response that never ran."""
        self._waiting.remove(waiting)
        waiting.held.release()
        ours = self.door.new_id()
        events = self._events(waiting.create, ours)
        self.say(*events.begin(), *events.cancelled(Usage(0, 0)))
        self._refused(AskerLeft("the client sent response.cancel"), f"{self.request_id}/{ours}", self._trace())
        self._advance()
        self._perhaps_rest()

    # Whose turn it is -------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin with whatever can begin: first come, first served."""
        taken = set(self._running)
        for waiting in tuple(self._waiting):
            if len(self._running) >= self.door.limits.websocket_running_max:
                break
            lane = waiting.create.stream_id
            if lane not in taken and waiting.parent is None:
                self._waiting.remove(waiting)
                self._start(waiting)
            taken.add(lane)

    def _start(self, waiting: _Waiting) -> None:
        create, ours = waiting.create, self.door.new_id()
        counted = RequestRecord(
            f"{self.request_id}/{ours}",
            create.model,
            "responses",
            trio.current_time(),
            key=self.key,
            what=WHAT,
            trace=self._trace(),
            settles=False,
        )
        running = _Running(create, ours, self._events(create, ours), counted, waiting.before, waiting.held)
        self._running[create.stream_id] = running
        self.tasks.start_soon(self._run, running, name=f"response {ours}")

    def _trace(self) -> Trace:
        return child_span(self.caller, self.door.new_id())

    def _events(self, create: responses.Create, ours: str) -> responses.Events:
        return responses.Events(create, request_id=ours, created_at=int(self.door.now()))

    async def _run(self, running: _Running) -> None:
        """Answer one request, and let go those that waited for it; a cancelled connection needs neither."""
        said = False
        try:
            await self._answer(running)
            said = True
            self._ended(running)
        except (SlowClient, trio.BrokenResourceError) as error:
            self.lost(error)
        finally:
            self._settle(running.counted, said=said)

    def _settle(self, counted: RequestRecord, *, said: bool) -> None:
        """Have a response told of as what the client gets of it, once the socket has taken it or cannot."""
        outbox, door = self.outbox, self.door

        def sent(whole: bool) -> None:
            if not whole:  # other lanes' events may be among what was lost, so this is the least that has left
                counted.sent_bytes = max(0, counted.sent_bytes - outbox.lost_bytes)
            door.asking.settle(counted, None if whole and said else door.cut_reason(outbox))

        outbox.on_sent(sent)

    def _ended(self, running: _Running) -> None:
        del self._running[running.create.stream_id]
        running.held.release()
        for waiting in self._waiting:
            if waiting.parent is running:
                waiting.parent, waiting.before = None, self._memory.find(running.events.id)
        self._advance()
        self._perhaps_rest()

    def _perhaps_rest(self) -> None:
        if not self.busy:
            self.at_rest()

    # Answering --------------------------------------------------------------------------------

    async def _answer(self, running: _Running) -> None:
        """Say one response from its beginning to its end, and remember it if it can be continued."""
        create, events, counted = running.create, running.events, running.counted

        def finish(answered: Answered) -> tuple[bytes, ...]:
            return events.finish(running.ended, answered.usage)

        try:
            before = self._before(running)
            history = () if before is None else before.turns
            served = self.door.asking.find(create.model)
            respond = responses.to_respond(create, request_id=running.id, history=history)
            last = await self.door.answer(respond, served, counted, self._into(running), finish)
        except (SlowClient, trio.BrokenResourceError):
            raise
        except AskerLeft:
            before = running.before
            begin = () if running.begun else events.begin()
            counted.sent_bytes += self.say(*begin, *events.cancelled(counted.usage))
        except RequestError as error:
            self._failed(running, error)
            return
        except Exception as bug:  # noqa: BLE001  # it is logged there
            self._failed(running, internal_error(bug, counted.request_id, counted.trace))
            return
        else:
            with self.door.answers.holding(self.door.memory_owner(self.key)) as held:
                with suppress(Overloaded):  # then it goes into the backlog at once, as every other event does
                    held.grow(size := sum(map(len, last)))
                    await self.outbox.wait_room(size)  # they repeat the text several times
                counted.sent_bytes += self.say(*last)
        said = create.turns() + (() if create.warm_up else (Turn(Role.ASSISTANT, events.text),))
        self._memory.remember(create.stream_id, Said.after(before, events.id, *said))

    def _into(self, running: _Running) -> Callable[[TextReply], None]:
        """Return what says each reply, in the turn in which it comes."""
        say, events, counted = self.say, running.events, running.counted

        def pass_on(reply: TextReply) -> None:
            match reply:
                case Text():
                    counted.sent_bytes += say(*events.deltas(reply))
                case Started():
                    counted.sent_bytes += say(*events.open())
                case Accepted():
                    running.begun = True
                    counted.sent_bytes += say(*events.begin())
                case ChoiceEnded():
                    running.ended = reply

        return pass_on

    def _before(self, running: _Running) -> Said | None:
        """Return the conversation that a request continues; raises `PreviousResponseNotFound`."""
        if trio.current_time() >= self.expires_at:
            raise ConnectionExpired("create a new connection to continue")
        wanted = running.create.previous_response_id
        if wanted is None:
            return None
        if running.before is None and (found := self._memory.find(wanted)) is not None:
            running.before = found
        if running.before is None:
            said = f"Previous response with id '{wanted}' not found."
            raise PreviousResponseNotFound(said, param="previous_response_id")
        return running.before

    def _failed(self, running: _Running, error: RequestError) -> None:
        """Say that a response failed, and forget what it continued in its own lane, as OpenAI's server does."""
        create = running.create
        self.forget(create.stream_id, create.previous_response_id)
        if running.begun:
            running.counted.sent_bytes += self.say(running.events.failed(error, running.counted.usage))
        else:
            running.counted.sent_bytes += self.say(responses.error_event(error, create.stream_id))
        self._refused(error, running.counted.request_id, running.counted.trace)

    def _refused(self, error: RequestError, request_id: str, trace: Trace | None) -> None:
        self.door.refused(error, request_id=request_id, what=WHAT, key=self.key, trace=trace)
