"""The whole system: workers behind a router, a processor and the real gateway; clients come over socket pairs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import cast

import trio
from attrs import Factory, define, evolve, field

from actors.engines.simulated.hand_off import HAND_OFF
from actors.kit.calls import Call, mailbox
from actors.kit.direct import DirectAddress, DirectCalls
from actors.kit.offload import run_inline
from actors.kit.priority_inbox import priority_inbox
from actors.processor import TextReply, TextRequest, TextResult, processor
from actors.router import router
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.cost import generation_tokens
from protocol.dialects.targets import ITL_FIELD, TTFT_FIELD
from protocol.errors import PeerLost
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg, LoadUpdate, NodeState, check_loads, check_state
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.media import Encode
from supervisor.cluster import models, operations, readiness
from supervisor.cluster.announcements import Announcer
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.model_pool import ModelPool
from supervisor.engines.work import RequestInbox
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.keys.key_sources import ADMIN, KEYS, KeySources
from supervisor.gateway.keys.keys import Keys
from supervisor.gateway.limits import GatewayLimits
from supervisor.gateway.listening import GatewayPort
from supervisor.gateway.origins import Origins
from supervisor.gateway.ports import NO_ADMINISTRATION, GatewayRuntime, Probes
from supervisor.gateway.refusals import Refusals
from supervisor.gateway.requests import RequestRunner, ServedModel
from supervisor.gateway.server import serve_stream
from supervisor.links.link import Link
from supervisor.links.serving import Service, Services
from supervisor.node import monitoring
from supervisor.node.assembly import in_order
from supervisor.node.node import Node
from supervisor.supervision.tree import Child, Tree
from supervisor.telemetry.metrics import Metrics
from tests.rig.fake_engine import Costs, prompt_of
from tests.rig.fake_host import FakeHost
from tests.rig.gateway import TINY
from tests.rig.network import SimTransport
from tests.rig.scheduler import tasks
from tests.rig.small_system import SmallSystem
from tests.system.simulator import tls
from tests.system.simulator.engines import SeeingHost
from tests.system.simulator.instrumented import FaultyDecode, RecordingGate
from tests.system.simulator.nodes import bare_node
from tests.system.simulator.offers import owner, register_workers, urgency, work
from tests.system.simulator.pictures import SIGHTED
from tests.system.simulator.prefix_system import NodePublishers, PrefixRouting, PrefixSystem
from tests.system.simulator.programs import ADMIN_SECRET

LIMITS = GatewayLimits(head_s=5.0, body_s=5.0, idle_s=60.0, stall_s=3.0, close_s=1.0, send_buffer_bytes=4096)
EVENT_BYTES_MAX = 4096  # about what the longest of these answers ends with
ROUTED_MAX = 64  # requests that wait for a worker
READMIT_ROUNDS = 5  # rounds of requests
NEVER_ENDS: frozenset[int] = frozenset()  # to the fake engine a token that ends answers is like any other
NOON = 1_700_000_000.5


@define(eq=False)
class System(PrefixSystem):
    """Everything from a client's socket to an engine's host, in the shape that `supervisor.node.assembly` gives it."""

    host_of: Callable[[SimTransport, Costs], FakeHost] = SeeingHost
    route: FailoverLimits = FailoverLimits()
    node_name: str = "main"
    tls: bool = False  # between clients and the gateway
    direct: bool = True  # the processor and the router have direct addresses; without, all calls go by their inboxes
    limits: GatewayLimits = LIMITS
    requests_max: int = 8
    waiting_max: int = 8
    admit_s: float = 5.0
    first_token_s: float = 60.0
    total_s: float = 120.0
    drain_s: float = 5.0
    secrets: Mapping[str, str] = Factory(dict)  # of client keys, by name; without any, clients need no key
    operated: bool = False  # operators have its engines carry out operations
    gateway: Gateway = field(init=False)
    decode: FaultyDecode = field(init=False)
    gate: RecordingGate = field(init=False)
    asked_direct: DirectCalls[TextRequest, TextReply, TextResult] = field(factory=DirectCalls)
    routed_direct: DirectCalls[Generate, Started | Tokens, Finished] = field(init=False)
    asked_inbox: trio.MemoryReceiveChannel[Call[TextRequest, TextReply, TextResult]] = field(init=False)
    directory: Directory = field(init=False)  # of the node with the gateway
    offered: Directory = field(init=False)  # of the node with the workers
    inboxes: list[RequestInbox] = Factory(list)  # of the workers
    routing: Routing = field(init=False)
    routed: RequestInbox = field(init=False)
    node: Node = field(init=False)
    numbers: Iterator[int] = field(factory=partial(count, 1))  # of requests
    rooms: Iterator[int] = field(factory=partial(count, 1))
    refused: set[tuple[int, ...]] = Factory(set)  # prompts that the engines refuse
    sockets: list[trio.SocketStream] = Factory(list)  # the gateway's ends
    _refusing: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(4))
    _refusals: Refusals = field(factory=Refusals)
    _gateway_nursery: trio.Nursery | None = None

    def __attrs_post_init__(self) -> None:
        PrefixSystem.__attrs_post_init__(self)
        self._register_workers()
        self.prefix_routing = PrefixRouting(self.prefixes, self.directory, self.cache_lives)
        new_id = lambda: f"{next(self.numbers) << 16:032x}"  # noqa: E731  # the last digits tell choices apart
        address, self.routed = priority_inbox(ROUTED_MAX, urgency, owner, generation_tokens, self._pools_of)
        self.routing = Routing(
            ModelPool(self.directory, "tiny"),
            self.prefix_routing.policy(),
            self.route,
            partial(next, self.rooms),
            new_id,
            0,
            NEVER_ENDS,
            hand_offs={"simulated": HAND_OFF, "fake": HAND_OFF},
        )
        self.routed_direct = DirectCalls(self.routed.pass_by)
        self.decode = FaultyDecode(DirectAddress(address.inbox, self.routed_direct) if self.direct else address)
        self.costs.refused = self._refuses
        asked, self.asked_inbox = mailbox(self.requests_max)
        model, longest = (
            partial(models.model_object, "tiny", self.directory, 7),
            partial(models.request_tokens_max, self.directory, "tiny"),
        )
        engines = {str(number): registration for number, registration in enumerate(self.engines)}
        metrics = Metrics()
        never_ready = partial(readiness.never_ready, self.directory, ("tiny",))
        self.gate = RecordingGate(self.requests_max, self.admit_s, self.waiting_max, never_ready)
        self.gateway = Gateway(
            runner=RequestRunner(
                {
                    "tiny": ServedModel(
                        model,
                        DirectAddress(asked.inbox, self.asked_direct) if self.direct else asked,
                        longest,
                        frozenset({TTFT_FIELD, ITL_FIELD}),
                    )
                },
                metrics,
                self.first_token_s,
                self.total_s,
            ),
            gate=self.gate,
            limits=self.limits,
            origins=Origins(frozenset({"127.0.0.1"})),
            keys=_keys(self.secrets, ADMIN_SECRET if self.operated else None),
            port=GatewayPort(tls=tls.server() if self.tls else None),
            runtime=GatewayRuntime(new_id=new_id, now=lambda: NOON + trio.current_time()),
            probes=Probes(
                unready=partial(readiness.unready, self.directory, ("tiny",)),
                metrics_text=partial(monitoring.local_metrics_text, engines, metrics),
            ),
            administration=evolve(NO_ADMINISTRATION, operate=partial(operations.operate, self.directory)),
        )
        self.node = bare_node(self.directory, self.gateway, None, self.drain_s, self.scope)

    def _pools_of(self, request: Generate) -> tuple[str, ...]:
        return self.routing.levels.group(request)

    def new_directory(self) -> Directory:
        """Return the directory of the gateway's node."""
        return Directory(self.node_name)

    def _register_workers(self) -> None:
        """Register the workers in the directory of their node: the gateway's own, or another behind a link."""
        self.directory = self.new_directory()
        self.offered = Directory("far") if self.far else self.directory
        self.inboxes = register_workers(self, self.offered)
        self.encoding = self.node_encoders(self.offered)
        self.publishers = NodePublishers(self.prefixes, self.offered, self)
        if self.far:
            self.directory.configure("far", None, self.offered.state().offers)

    def children(self, *workers: Tree) -> tuple[Child | Tree, ...]:
        front = (Child(name="front", run=self._front, start_within_s=15.0),) if self.far else ()
        others = (
            *workers,
            *self.encoding.trees(),
            *self.publishers.trees,
            *self.prefix_routing.children(),
            *front,
            *self.media_children(),
            Child(name="router", run=router, args=(self.routed, self.routing, self.routed_direct), needs=()),
            Child(name="processor", run=self._processor, needs=()),
        )
        gateway = Child(name="gateway", run=self._gateway, stop_within_s=self.limits.close_s + 1)
        return in_order(gateway=(gateway,), monitoring=(), links=self.linking(), others=tuple(others))

    def linking(self) -> tuple[Child, ...]:
        """Return the children that keep the links to other nodes."""
        return ()

    # The children ----------------------------------------------------------------------

    async def _gateway(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Do what `supervisor.gateway.server.serve` does, without a listener."""
        async with trio.open_nursery() as nursery:
            self._gateway_nursery = nursery
            nursery.start_soon(self.gateway.runner.access.run, name="access")
            nursery.start_soon(self._refusals.run, name="refusals")
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._gateway_nursery = None

    async def _processor(self, *, task_status: trio.TaskStatus[None]) -> None:
        by_blocks = self.prefixes is not None
        limits = partial(models.request_limits, self.directory, "tiny", 2048, by_blocks=by_blocks)
        model, vision = TINY, None
        if self.sighted:
            model = SIGHTED
            vision = self.vision(self.directory, self.route, self.gateway.runtime.new_id, self._encoded_elsewhere)
        serve = partial(processor, self.asked_inbox, model, self.decode, limits, run_inline, self.requests_max)
        await serve(direct=self.asked_direct, vision=vision, task_status=task_status)

    def _encoded_elsewhere(self, code: str, sent: int) -> None:
        self.routing.observer.call_resumed(code, sent)

    async def _decode(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        await work(self, self.offered, self.inboxes, number, task_status=task_status)

    async def _front(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the link to the workers' node, as `supervisor.cluster.mesh` does, without greeting and heartbeat."""
        near, far = self.pair("front")
        near_link = Link(near, Peer("main", serves_max=0), on_announcement=partial(self._on_announcement, "far"))
        workers = self.offered.local.items()
        serves: Services = {
            (name, Encode if here.leg is Leg.ENCODE else Generate): cast("Service", EngineService(here, "main"))
            for name, here in workers
        }
        streams = self.streams + self.front_watches
        server = self.server = Link(far, Peer("far", serves_max=streams), self.publishers.serving(serves))

        async def carry() -> None:
            try:
                await near_link.run()
            finally:  # at once, even if the other end still waits
                self.directory.unlinked("far", near_link)
                self.offered.unlinked("main", server)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run, name="front.server")
                nursery.start_soon(carry, name="front.asker")
                await near_link.wait_ready()
                self.directory.linked("far", near_link)
                self.offered.linked("main", server)
                self.offered.merge_state("main", NodeState(routes=True, takes_encoders=True))
                announcer = Announcer(self.offered)
                announcer.add("main", server)
                nursery.start_soon(announcer.run, float, name="front.teller")
                while readiness.never_ready(self.directory, ("tiny",)):
                    await self.directory.wait_changed()
                with self.front.publish(near_link):
                    task_status.started()
                    await trio.sleep_forever()
        except* PeerLost:
            raise PeerLost("the front was cut") from None

    def _on_announcement(self, node: str, message: object) -> None:
        if isinstance(message, NodeState):
            self.directory.merge_state(node, check_state(message))
        else:
            assert isinstance(message, LoadUpdate)
            self.directory.merge_loads(node, check_loads(message))

    # Clients -----------------------------------------------------------------------------

    def connect(self) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        """Connect a client, with TLS if the gateway has it; raises `trio.BrokenResourceError` if it does not listen."""
        if self._gateway_nursery is None:
            raise trio.BrokenResourceError("the gateway does not listen")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer_bytes)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        self.sockets.append(stream)
        self._gateway_nursery.start_soon(
            serve_stream, self.gateway, ROUTES, self._refusing, self._refusals, stream, name="connection"
        )
        raw = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        return tls.wrap(raw) if self.tls else raw

    def drain(self) -> None:
        """Begin to drain and end, as a node does on SIGTERM."""
        self.node.drain("the test drains")

    def heal(self) -> None:
        """Remove all faults, and lengthen every deadline."""
        self.decode.bugs = 0
        self.heal_pictures()
        self.heal_prefixes()
        self.gateway.keys = Keys()
        self.gateway.runner.first_token_s = self.gateway.runner.total_s = 300.0
        self.gateway.gate.admit_s, self.gateway.gate.waiting_max = 300.0, 16
        self.gateway.limits = evolve(self.gateway.limits, websocket_running_max=16, websocket_queue_max=16)

    @property
    def answered_within_s(self) -> float:
        """The longest time until a client has the end of its answer."""
        return self.admit_s + self.total_s + 1.0

    @property
    def at_once_max(self) -> int:
        return min(self.requests_max, self.streams) if self.far else self.requests_max

    async def probe_all(self, count: int) -> None:
        """Check that so many concurrent requests are answered: each over its own connection, or all in lanes of one."""
        from tests.system.simulator import probes

        await (probes.in_lanes if count % 2 else probes.each_alone)(self, count)

    async def readmit_workers(self) -> None:
        """Send requests until every ejected worker has been probed and is used again."""
        from tests.system.simulator.probes import choose_ejected

        self.routing.policy = partial(choose_ejected, self.routing.outliers)  # `kv` may prefer others, with its prefix
        for _ in range(READMIT_ROUNDS):
            if not any("+" not in ejection.name for ejection in self.routing.outliers.ejected(trio.current_time())):
                return
            await self.probe_all(self.at_once_max)
        raise AssertionError("a healthy worker gets no requests")

    async def check_serves(self) -> None:
        """Check that all slots can be taken at once."""
        await self.readmit_workers()
        self.routing.policy = least_loaded  # `kv` lets requests wait for a worker that has their beginnings
        await self.encoding.check_serves()
        await SmallSystem.check_serves(self)

    def _refuses(self, request_id: str) -> bool:
        """Whether the engines refuse the prompt of this request, which they do only when it runs."""
        running = (host.scheduler.running.get(request_id) for host in self.hosts.values())
        return any(held is not None and prompt_of(held.request) in self.refused for held in running)

    @property
    def cancel_delay_s(self) -> float:
        """How long a `Cancel` that is sent now may wait behind earlier frames: ten usual delays for each buffer of them."""
        if not self.far or self.front.current is None:
            return 0.0
        behind_bytes = self.front.current.peer.queued_bytes + self.transports["front"].in_flight
        room, delay_s = self.network["room"], self.network["delay_s"]
        return float(behind_bytes / room * 10 * delay_s)

    @property
    def operated_systems(self) -> list[SmallSystem]:
        """Every node that is up and has engines."""
        return [self]

    async def put_all_right(self) -> None:
        """Put right what operators have left at any engine."""
        for system in self.operated_systems:
            await system.put_right()

    # Checks ------------------------------------------------------------------------------

    def holding(self, prompt: list[int]) -> bool:
        """Whether any engine that is up holds a request with this prompt."""
        up = (host.scheduler for number, host in self.hosts.items() if self.engines[number].live is not None)
        return any(list(prompt_of(request)) == prompt for scheduler in up for request in scheduler.requests)

    def check_backlogs(self) -> None:
        """Check that no client's backlog exceeds its limit by more than one event."""
        most = self.limits.backlog_bytes_max + EVENT_BYTES_MAX
        assert all(outbox.backlog_bytes <= most for outbox in self.gateway.connections), "a backlog is above its limit"

    def given(self, prompt: list[int], seed: int | None) -> int:
        """Return the number of tokens that the engines computed for what they saw and a seed."""
        return max(int(host.scheduler.given.get((tuple(prompt), seed), 0)) for host in self.hosts.values())

    def check_nothing_is_left(self) -> None:
        """Check that nothing of a node that has ended is left."""
        self._check_gateway()
        self.media.check_free()
        assert self.over.is_set()
        assert not {"host", "line", "connection", "front.asker", "front.server"} & set(tasks()), (
            "a task outlives the node"
        )

    async def check_at_rest(self) -> None:
        """Check that nothing is left of any client, in the gateway, the router, the media actor or the workers."""
        self._check_gateway()
        self.check_no_pictures()
        self.check_routes()
        inbox = self.asked_inbox.statistics()
        assert (inbox.current_buffer_used, inbox.tasks_waiting_send) == (0, 0)
        assert not self.asked_direct.running
        await SmallSystem.check_at_rest(self)
        self.prefix_routing.check()

    def check_routes(self) -> None:
        """Check that the router has no request, and that no worker counts one."""
        assert not self.routed_direct.running, "the router still answers a call"
        assert not self.routing.statistics().requests, "a reservation has no request"
        for inbox in (self.routed, *self.inboxes):
            assert inbox.waiting == (0, 0), "a call waits"
        for worker in (*self.offered.local.values(), *self.directory.workers("tiny")):
            assert (worker.load.busy, worker.load.tokens, worker.load.pending) == (0, 0, 0), (
                "a worker counts a request that is over"
            )

    def _check_gateway(self) -> None:
        assert not self.gateway.connections, "a connection is open"
        assert (self.gateway.gate.inside, self.gateway.gate.waiting) == (0, 0), "a request is admitted or waits"
        assert not self.gateway.runner.running, "a request is still counted"
        assert all(stream.socket.fileno() == -1 for stream in self.sockets), "a file descriptor is open"


def _keys(secrets: Mapping[str, str], admin: str | None) -> Keys:
    listed = ",".join("=".join(each) for each in secrets.items())
    environment = ({KEYS: listed} if secrets else {}) | ({} if admin is None else {ADMIN: admin})
    keys = Keys(KeySources(environment=environment))
    keys.load()
    return keys
