"""Connections that have not authenticated make room for others."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from supervisor.sockets.unauthenticated import UnauthenticatedConnections, address_of
from tests.rig.gateway import chat, gateway_rig, head, leave_all, post
from tests.rig.keys import as_, require_keys

KEY = as_("alice")


async def test_slow_heads_without_a_key_keep_out_no_client_with_a_key(rather_slow: MockClock) -> None:
    """Each of them is opened again when it ends; every request with a key is answered."""
    async with gateway_rig(connections_max=20) as rig:
        require_keys(rig)
        answered = 0

        async def slow() -> None:
            while True:
                stream = await rig.connect()
                await stream.send_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n")
                try:
                    while await stream.receive_some(100):
                        pass
                except trio.BrokenResourceError:
                    pass
                await trio.sleep(0.2)
                stream.socket.close()

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(slow)
            await trio.sleep(1)
            held = await rig.client()
            await held.send(post(chat("n=8 s=1", stream=True, max_completion_tokens=8), **KEY))
            for _ in range(5):
                client = await rig.client()
                assert (await client.ask(post(chat("n=1"), **KEY))).status == 200
                answered += 1
                await client.stream.aclose()
                await trio.sleep(1)
            assert (await held.reply()).whole
            assert len(rig.gateway.connections) <= 20
            nursery.cancel_scope.cancel()
        assert answered == 5
        assert b'espalier_clients_dropped_total{reason="unauthenticated"}' in rig.metrics.render({})


async def test_authenticated_connections_make_no_room(rather_slow: MockClock) -> None:
    async with gateway_rig(connections_max=2) as rig:
        require_keys(rig)
        for headers in (KEY, as_("bob")):
            assert (await (await rig.client()).ask(post(chat("n=1"), **headers))).status == 200
        assert (await (await rig.client()).reply()).status == 503
        await leave_all(rig)


async def test_connections_beyond_those_of_their_key_make_room(rather_slow: MockClock) -> None:
    async with gateway_rig(connections_max=3, key_connections_max=1) as rig:
        require_keys(rig)
        first, *beyond = [await rig.client() for _ in range(3)]
        assert (await first.ask(post(chat("n=1"), **KEY))).status == 200
        for client in beyond:
            assert (await client.ask(post(chat("n=1"), **KEY))).status == 429
        assert (await (await rig.client()).ask(post(chat("n=1"), **as_("bob")))).status == 200
        assert (await (await rig.client()).ask(head())).status == 200
        assert [await client.closed() for client in beyond] == [True, True]
        assert (await first.ask(post(chat("n=1"), **KEY))).status == 200


async def test_a_probe_does_not_authenticate_its_connection_where_keys_are_wanted(rather_slow: MockClock) -> None:
    async with gateway_rig(connections_max=1) as rig:
        require_keys(rig)
        probe = await rig.client()
        assert (await probe.ask(head())).status == 200
        assert (await (await rig.client()).ask(post(chat("n=1"), **KEY))).status == 200
        assert await probe.closed()


async def test_an_address_with_too_many_unauthenticated_connections_loses_its_oldest(
    rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from supervisor.gateway import server as module

    addresses = iter(["far", "near", "far", "far"])
    monkeypatch.setattr(module, "address_of", lambda _: next(addresses))
    async with gateway_rig(address_connections_max=2) as rig:
        clients = []
        for _ in range(4):
            clients.append(await rig.client())
            await clients[-1].send(b"GET /hea")
            await trio.sleep(0.1)
        assert (await clients[0].reply()).status == 503
        assert await clients[0].closed()
        for client in clients[1:]:
            await client.send(head()[8:])
            assert (await client.reply()).status == 200


class Named:
    def __init__(self, address: str | tuple[str | int, ...] | None) -> None:
        self.socket = self
        self.address = address

    def getpeername(self) -> str | tuple[str | int, ...]:
        if self.address is None:
            raise OSError
        return self.address


@pytest.mark.parametrize(
    ("name", "address"),
    [
        (("127.0.0.1", 1), ""),
        (("::1", 1, 0, 0), ""),
        (("::ffff:127.0.0.1", 1, 0, 0), ""),
        ("", ""),
        (None, ""),
        (("10.0.0.1", 1), "10.0.0.1"),
        (("::ffff:10.0.0.1", 1, 0, 0), "10.0.0.1"),
        (("2001:db8::1", 1, 0, 0), "20010db800000000"),
        (("2001:db8::2:1", 1, 0, 0), "20010db800000000"),
        (("fe80::1%eth0", 1, 0, 2), "fe80000000000000"),
    ],
)
def test_addresses_of_this_host_are_empty_and_ipv6_counts_by_its_first_half(
    name: str | tuple[str | int, ...] | None, address: str
) -> None:
    assert address_of(cast("trio.SocketStream", Named(name))) == address


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "end", "end of"]), st.sampled_from("ab"), st.integers(0, 9)))
)
def test_unauthenticated_connections_are_closed_oldest_first(steps: list[Any]) -> None:
    connections: UnauthenticatedConnections[int] = UnauthenticatedConnections()
    all_: list[tuple[int, str]] = []
    scopes: dict[int, trio.CancelScope] = {}
    for number, (what, address, at) in enumerate(steps):
        if what == "add":
            scopes[number] = trio.CancelScope()
            connections.add(number, address, scopes[number])
            all_.append((number, address))
        elif what == "remove" and all_:
            gone, _ = all_.pop(at % len(all_))
            assert connections.remove(gone) is scopes[gone]
            assert connections.remove(gone) is None
        elif what.startswith("end"):
            only = None if what == "end" else address
            oldest = next((each for each in all_ if only in {None, each[1]}), None)
            assert connections.close_oldest(only) == (None if oldest is None else oldest[0])
            if oldest is not None:
                all_.remove(oldest)
                assert scopes[oldest[0]].cancel_called
        assert all(connections.count_from(each) == sum(own == each for _, own in all_) for each in "ab")
    assert list(connections) == [number for number, _ in all_]


@given(st.lists(st.sampled_from("abc")))
def test_the_busiest_address_loses_its_oldest_connection(addresses: list[Any]) -> None:
    connections: UnauthenticatedConnections[int] = UnauthenticatedConnections()
    left = list(enumerate(addresses))
    for number, address in left:
        connections.add(number, address, trio.CancelScope())
    while left:
        own = [address for _, address in left]
        most = max(map(own.count, own))
        expected = next(each for each in left if own.count(each[1]) == most)
        assert len(connections) == len(left)
        assert connections.close_oldest_of_busiest_address() == expected[0]
        left.remove(expected)
    assert (connections.close_oldest_of_busiest_address(), len(connections)) == (None, 0)
