"""A decode's node connects to a prefill's bootstrap server before its engine is asked to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from pathlib import Path

import pytest
import trio
from attrs import Factory, define
from trio.testing import MockClock

from actors.engines.sglang.hand_off import Rendezvous, without_partner
from actors.engines.simulated.spec import SimulatedSpec
from protocol.errors import HandOffFailed
from supervisor.engines.kinds import read_cluster
from supervisor.engines.sglang import bootstrap_addresses
from supervisor.engines.sglang.bootstrap_addresses import ANSWER_S, FAILED_S, REACHED_S, BootstrapAddresses
from supervisor.supervision.tree import Child, Tree
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL, engine
from tests.rig.tasks import append_result

NEAR = Rendezvous(1, "near", 9000).encode()


@define
class Stream:
    """A connection to a server that answers after a while, or closes it."""

    network: Network

    async def send_all(self, data: bytes) -> None:
        assert data.startswith(b"GET /health HTTP/1.1\r\n")
        await trio.lowlevel.checkpoint()

    async def receive_some(self, _: int) -> bytes:
        await trio.sleep(self.network.answers_in_s)
        return b"" if self.network.closes else b"H"

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


@define
class Network:
    """Connections that take so long, or are refused, and servers at their ends."""

    takes_s: float = 0.01
    refuses: bool = False
    answers_in_s: float = 0.0
    closes: bool = False
    tried: list[tuple[str, int]] = Factory(list)

    async def connect(self, host: str, port: int) -> Stream:
        self.tried.append((host, port))
        await trio.sleep(self.takes_s)
        if self.refuses:
            raise OSError("connection refused")
        return Stream(self)


def reach_of(network: Network) -> BootstrapAddresses:
    return BootstrapAddresses(network.connect)  # type: ignore[arg-type]  # only closed


async def outcome(addresses: BootstrapAddresses, hand_off: bytes = NEAR) -> str | None:
    """Return why a prefill cannot be reached, None if it can."""
    try:
        if (reaching := addresses.reach(hand_off)) is not None:
            await reaching
    except HandOffFailed as error:
        return str(error)
    return None


async def test_a_prefill_that_was_reached_costs_no_request_a_connection_for_a_while(autojump_clock: MockClock) -> None:
    network = Network()
    addresses = reach_of(network)
    assert await outcome(addresses) is None
    assert addresses.reach(Rendezvous(2, "near", 9000).encode()) is None
    assert await outcome(addresses, Rendezvous(3, "near", 9001).encode()) is None, "another life has another port"
    await trio.sleep(REACHED_S)
    assert await outcome(addresses) is None
    assert network.tried == [("near", 9000), ("near", 9001), ("near", 9000)]


@pytest.mark.parametrize(
    ("network", "why", "after_s"),
    [
        (Network(takes_s=inf), "no answer within 1 s", ANSWER_S),
        (Network(takes_s=0.25, answers_in_s=inf), "no answer within 1 s", ANSWER_S),
        (Network(takes_s=0.25, closes=True), "it closes connections without an answer", 0.25),
        (Network(takes_s=0.5, refuses=True), "connection refused", 0.5),
    ],
    ids=["dropped", "hung", "closed", "refused"],
)
async def test_requests_for_a_prefill_out_of_reach_fail_together_and_later_ones_at_once(
    network: Network, why: str, after_s: float, autojump_clock: MockClock
) -> None:
    addresses, reasons = reach_of(network), list[str | None]()
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(append_result, reasons, outcome, addresses)
    assert trio.current_time() == after_s
    assert await outcome(addresses) == reasons[0]
    assert reasons == [f"the prefill at port 9000 of near cannot be reached: {why}"] * 8
    assert trio.current_time() == after_s
    assert len(network.tried) == 1
    await trio.sleep(FAILED_S)
    network.takes_s, network.answers_in_s, network.refuses, network.closes = 0.0, 0.0, False, False
    assert await outcome(addresses) is None


async def test_the_next_request_tries_where_the_one_that_tried_has_left(autojump_clock: MockClock) -> None:
    network = Network(takes_s=0.5)
    addresses, reasons = reach_of(network), list[str | None]()
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.25):
            nursery.start_soon(append_result, reasons, outcome, addresses)
            await outcome(addresses)
    assert reasons == [None]
    assert trio.current_time() <= 0.75


def test_either_leg_of_a_pair_is_given_the_way_to_prefills_which_its_role_may_need(
    written: Callable[[str], Path],
) -> None:
    legs = [
        f'{engine(leg, "main").replace("simulated", "sglang")}device = "cpu"\nleg = "{leg}"\n'
        for leg in ("prefill", "decode")
    ]
    cluster = read_cluster(written("[gateway]\nport = 0\n" + MODEL + legs[0] + "bootstrap_port = 9000\n" + legs[1]))
    assembly, _ = built_assembly(cluster, "main")
    trees = {child.name: child for child in assembly.tree.children if isinstance(child, Tree)}
    given = {child.name: child.args for tree in trees.values() for child in tree.children if isinstance(child, Child)}
    for name in ("prefill", "decode"):
        reach = [isinstance(getattr(each, "__self__", None), BootstrapAddresses) for each in given[name]]
        assert reach == [False, False, True]


async def test_a_hand_off_without_a_partner_or_without_sense_is_the_engines_own() -> None:
    addresses = BootstrapAddresses()
    assert addresses.reach(without_partner(SimulatedSpec().info, rank=0, number=7)) is None
    assert addresses.reach(b"") is None


@pytest.mark.realtime
@pytest.mark.parametrize("full", [False, True])
async def test_a_real_listener_is_reached_and_one_that_drops_packets_is_not(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_addresses, "ANSWER_S", 0.5)

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some(1)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as stack:
        for each in [stack.enter_context(socket.socket()) for _ in range(4 if full else 0)]:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        async with trio.open_nursery() as nursery:
            if not full:
                nursery.start_soon(trio.serve_listeners, serve, [listening])
            why = await outcome(BootstrapAddresses(), Rendezvous(1, *listener.getsockname()[:2]).encode())
            assert (why is not None) is full
            nursery.cancel_scope.cancel()
