"""The whole system: the world's workers behind a processor and the real doors; clients come over socket pairs."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace

import trio
from attrs import Factory, define, evolve, field

from actors._kit import Address, Answer, mailbox
from actors.processor import processor
from protocol.messages import Finished, Generate, Started, Tokens
from supervisor import known
from supervisor.doors.asking import Asking, Served
from supervisor.doors.door import Door, DoorLimits
from supervisor.doors.gate import Gate
from supervisor.gateway import _accepted
from supervisor.house import House
from supervisor.link import Link
from supervisor.metrics import Metrics
from supervisor.node import _Node
from supervisor.plug import Plug
from supervisor.process import Hurry
from supervisor.tree import Child, Tree
from tests.doors import TINY
from tests.fakes import FakeHost, Scheduler, whole
from tests.sim import secure
from tests.sim.clock import tasks
from tests.world import World

LIMITS = DoorLimits(head_s=5.0, body_s=5.0, idle_s=60.0, stall_s=3.0, close_s=1.0, send_buffer_bytes=4096)
Asked = tuple[tuple[int, ...], int | None]  # a prompt and a seed
EVENT_BYTES_MAX = 4096  # about what the longest of these answers ends with
NOON = 1_700_000_000.5


@define(eq=False)
class _Seeded(Scheduler):
    """Answers each seed otherwise, so that choices can be told apart, and remembers how many tokens it gave each."""

    given: dict[Asked, int] = Factory(dict)

    def submit(self, request: Generate) -> None:
        Scheduler.submit(self, request)
        if request.sampling.seed is not None:
            held = self.waiting[-1]
            seeded = evolve(request, tokens=[*request.tokens, request.sampling.seed])
            held.ids, finished = whole(seeded, self.costs.vocabulary_size)
            usage = evolve(finished.usage, prompt_tokens=len(request.tokens))
            held.finished = evolve(finished, usage=usage)

    def abort(self, request_id: str) -> None:
        self._remember(request_id)
        Scheduler.abort(self, request_id)

    def _ended(self, request_id: str) -> None:
        self._remember(request_id)
        Scheduler._ended(self, request_id)

    def _remember(self, request_id: str) -> None:
        if (held := self._find(request_id)) is not None:
            self.given[tuple(held.request.tokens), held.request.sampling.seed] = held.given


@define(eq=False)
class _Host(FakeHost):
    def __attrs_post_init__(self) -> None:
        FakeHost.__attrs_post_init__(self)
        self.scheduler = _Seeded(self.costs, self._told)


@define(eq=False)
class _Decode:
    """Whoever decodes for the processor: the workers of this node or, over whatever link is up, of another."""

    near: Address
    front: Plug[Link]
    far: bool
    bugs: int = 0  # that are still to come

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Answer[Started | Tokens, Finished]]:
        if self.bugs:
            self.bugs -= 1
            raise ZeroDivisionError("a planted bug")
        asked = await self.front.wait() if self.far else self.near
        async with asked.ask(request, credit) as answer:
            yield answer


@define(eq=False)
class _Gate(Gate):
    """Remembers whether anybody ever had to wait, without which it must refuse nobody."""

    was_full: bool = False

    async def _wait(self, waiter: object) -> None:
        self.was_full = True
        await Gate._wait(self, waiter)

    async def _enter(self, priority: int) -> None:
        await Gate._enter(self, priority)
        assert self.inside <= self.requests_max


@define(eq=False)
class System(World):
    """Everything from a client's socket to an engine's host, in the shape that `supervisor.house` gives it."""

    host_of: Callable = _Host
    far: bool = False  # the workers are another node's, at the other end of a link
    tls: bool = False  # between clients and the gateway
    limits: DoorLimits = LIMITS
    requests_max: int = 8
    waiting_max: int = 8
    admit_s: float = 5.0
    first_token_s: float = 60.0
    total_s: float = 120.0
    drain_s: float = 5.0
    door: Door = field(init=False)
    decode: _Decode = field(init=False)
    asked: Address = field(init=False)
    asked_inbox: trio.MemoryReceiveChannel = field(init=False)
    node: _Node = field(init=False)
    refused: set[tuple[int, ...]] = Factory(set)  # prompts that the engines will not like
    sockets: list[trio.SocketStream] = Factory(list)  # the gateway's ends
    _refusing: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(4))
    _gateway_nursery: trio.Nursery | None = None

    def __attrs_post_init__(self) -> None:
        World.__attrs_post_init__(self)
        self.decode = _Decode(self.address, self.front, self.far)
        self.costs.refused = self._refuses
        self.asked, self.asked_inbox = mailbox(self.requests_max)
        numbers = count(1)
        engines = {str(number): plug for number, plug in enumerate(self.engines)}
        model, longest = partial(known.model, "tiny", self.engines, 7), partial(known.longest, self.engines)
        metrics = Metrics()
        self.door = Door(
            asking=Asking({"tiny": Served(model, self.asked, longest)}, metrics, self.first_token_s, self.total_s),
            gate=_Gate(self.requests_max, self.admit_s, self.waiting_max, partial(known.never_ready, engines)),
            limits=self.limits,
            names=frozenset({"127.0.0.1"}),
            unready=partial(known.unready, engines),
            metrics_text=partial(known.metrics_text, engines, metrics),
            new_id=lambda: f"{next(numbers) << 16:032x}",  # the last digits tell choices apart
            now=lambda: NOON + trio.current_time(),
            tls=secure.server() if self.tls else None,
        )
        house = House(self.tree, self.door)
        world = SimpleNamespace(hurry=Hurry())
        self.node = _Node(house, world, terminal=None, drain_s=self.drain_s, tree=self.scope)

    def children(self, *workers: Tree) -> tuple[Child | Tree, ...]:
        front = (Child(name="front", run=self._front),) if self.far else ()
        return (
            Child(name="gateway", run=self._gateway, stop_within_s=self.limits.close_s + 1),
            *workers,
            *front,
            Child(name="processor", run=self._processor),
        )

    # The children ----------------------------------------------------------------------

    async def _gateway(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Do what `supervisor.gateway.gateway` does, but for the listening."""
        async with trio.open_nursery() as nursery:
            self._gateway_nursery = nursery
            nursery.start_soon(self.door.asking.access.run, name="access")
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._gateway_nursery = None

    async def _processor(self, *, task_status: trio.TaskStatus[None]) -> None:
        limits = partial(known.limits, self.engines, 2048)
        serve = partial(processor, self.asked_inbox, TINY, self.decode, limits, _at_once, self.requests_max)
        await serve(task_status=task_status)

    # Clients -----------------------------------------------------------------------------

    def connect(self) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        """Connect a client as the kernel would, with TLS to come if the gateway speaks it; raises `trio.BrokenResourceError` if nobody listens."""
        if self._gateway_nursery is None:
            raise trio.BrokenResourceError("nobody listens")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer_bytes)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        self.sockets.append(stream)
        self._gateway_nursery.start_soon(_accepted, self.door, self._refusing, stream, name="connection")
        raw = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        return secure.wrap(raw) if self.tls else raw

    def heal(self) -> None:
        """Be well again, and patient."""
        self.decode.bugs = 0
        self.door.asking.first_token_s = self.door.asking.total_s = 300.0
        self.door.gate.admit_s, self.door.gate.waiting_max = 300.0, 16
        self.door.limits = evolve(self.door.limits, in_flight_max=16, queued_max=16)

    @property
    def answered_within_s(self) -> float:
        """How long a client waits at most for the end of its answer."""
        return self.admit_s + self.total_s + 1.0

    @property
    def at_once_max(self) -> int:
        return min(self.requests_max, self.streams) if self.far else self.requests_max

    async def probe_all(self, count: int) -> None:
        """Ask for so many answers at once and get them whole: each over its own connection, or all in lanes of one."""
        from tests.sim import probes

        await (probes.in_lanes if count % 2 else probes.each_alone)(self, count)

    def _refuses(self, request_id: str) -> bool:
        """Whether the engines find the prompt of this request wrong, which they say only when it runs."""
        running = (host.scheduler.running.get(request_id) for host in self.hosts.values())
        return any(held is not None and tuple(held.request.tokens) in self.refused for held in running)

    @property
    def way_s(self) -> float:
        """How long what is said to the workers now waits behind what was said before, ten times the usual for each roomful."""
        if not self.far or self.front.now is None:
            return 0.0
        behind_bytes = self.front.now.peer.queued_bytes + self.wires["front"].in_flight
        return behind_bytes / self.network["room"] * 10 * self.network["delay_s"]

    # Looking -----------------------------------------------------------------------------

    def holding(self, prompt: list[int]) -> bool:
        """Whether any engine that is up holds a request with this prompt."""
        up = (host.scheduler for number, host in self.hosts.items() if self.engines[number].now is not None)
        held = (each for scheduler in up for each in (*scheduler.running.values(), *scheduler.waiting))
        return any(each.request.tokens == prompt for each in held)

    def check_backlogs(self) -> None:
        """Check that no client's backlog is longer than it may be, or only by the last thing that was said to it."""
        most = self.limits.backlog_bytes_max + EVENT_BYTES_MAX
        assert all(outbox.backlog_bytes <= most for outbox in self.door.connections), "a backlog grows without end"

    def given(self, prompt: list[int], seed: int | None) -> int:
        """Return how many tokens the engines gave for a prompt and a seed."""
        return max(host.scheduler.given.get((tuple(prompt), seed), 0) for host in self.hosts.values())

    def check_nothing_is_left(self) -> None:
        """Check that of a node that has ended, nothing is left."""
        self._check_doors()
        assert self.over.is_set()
        assert not {"host", "line", "connection", "front.asker", "front.server"} & set(tasks()), (
            "a task outlives the node"
        )

    async def check_at_rest(self) -> None:
        """Check that nothing is left of any client, at the doors or behind them."""
        self._check_doors()
        inbox = self.asked.inbox.statistics()
        assert (inbox.current_buffer_used, inbox.tasks_waiting_send) == (0, 0)
        await World.check_at_rest(self)

    def _check_doors(self) -> None:
        assert not self.door.connections, "a connection was left behind"
        assert (self.door.gate.inside, self.door.gate.waiting) == (0, 0), "a place at the gate is taken"
        assert not self.door.asking._running, "a request is still counted"
        assert all(stream.socket.fileno() == -1 for stream in self.sockets), "a file descriptor is open"


async def _at_once(function):
    """Do what takes long at once: virtual time does not pass meanwhile."""
    await trio.lowlevel.checkpoint()
    return function()
