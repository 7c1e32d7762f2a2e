"""A node is dialed again: ever more seldom, at once after a good link, and for a while if only a rumour names it."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.errors import PeerLost
from protocol.link.greeting import Incarnation
from protocol.messages.cluster import Neighbour, NodeState
from supervisor.cluster.carried_links import CarriedLinks
from supervisor.cluster.mesh import FORGETS_S, RUMOUR_DIALS_MAX, Mesh
from supervisor.cluster.node_records import FORGET_S, UNCONFIRMED_BY_NODE_MAX
from supervisor.links.endpoint import Endpoint
from tests.rig.nodes import QUICK, Node


async def test_waits_between_dials_grow_and_differ(autojump_clock: MockClock) -> None:
    tries = []

    async def refuse(*_: object) -> NoReturn:
        tries.append(trio.current_time())
        raise PeerLost("nobody there")

    a = Node("a", port=None, section=evolve(QUICK, retry_min_s=0.1, retry_max_s=5.0))
    a.links.dial = refuse
    a.directory.configure("b", "127.0.0.1:1")
    with trio.move_on_after(200):
        await a.run()
    waits = [later - sooner for sooner, later in itertools.pairwise(tries)]
    assert all(0.1 * 2**n <= wait <= 0.2 * 2**n for n, wait in enumerate(waits[:5]))
    assert all(5 <= wait <= 10 for wait in waits[6:])
    assert len({round(wait, 6) for wait in waits[6:]}) > 5
    assert len(tries) > 20


@pytest.mark.parametrize(("lasts_s", "grow"), [(3.1, False), (2.9, True)], ids=["good", "hardly one"])
async def test_after_a_link_that_was_good_a_node_is_dialed_again_at_once(
    lasts_s: float, grow: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    begun, ended = [], []

    async def greeted(*_: str | Mesh | None) -> tuple[str, Incarnation]:
        return "b", Incarnation()

    async def carry(*_: Incarnation | str | CarriedLinks | None) -> None:
        begun.append(trio.current_time())
        await trio.sleep(lasts_s)
        ended.append(trio.current_time())
        raise PeerLost("draining: it restarts")

    async def dial(_: object, __: object, ___: float, talk: Callable[[Any], Awaitable[None]]) -> None:
        await talk(None)

    monkeypatch.setattr(Mesh, "greet", greeted)
    monkeypatch.setattr(CarriedLinks, "carry", carry)
    section = evolve(QUICK, silent_s=3.0, retry_min_s=0.1, retry_max_s=5.0)
    a = Node("a", port=None, section=section)
    a.links.dial = dial
    a.directory.configure("b", "127.0.0.1:1")
    with trio.move_on_after(100):
        await a.run()
    waits = [began - over for over, began in zip(ended, begun[1:], strict=False)]
    assert len(waits) > 8
    assert all(0.1 <= wait <= 0.2 for wait in waits) is not grow


async def test_a_node_that_is_a_rumour_is_dialed_for_a_while_and_again_when_it_is_named_again(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    tries = []

    async def refuse(*_: object) -> NoReturn:
        tries.append(trio.current_time())
        raise PeerLost("nobody there")

    a, rumour = Node("a", port=None), NodeState(neighbours=(Neighbour("b", "127.0.0.1:1"),))
    a.links.dial = refuse
    await nursery.start(a.run)
    a.directory.merge_state("gone", rumour)
    a.links.traffic["gone"].sent(1)
    await trio.sleep(3 * FORGET_S)
    assert FORGET_S - 1 < tries[-1] < FORGET_S + 3 * FORGETS_S
    assert (a.links.statistics().dialing, dict(a.links.traffic), a.directory.nodes) == (frozenset(), {}, {})
    a.directory.merge_state("gone", rumour)
    await trio.sleep(1)
    assert tries[-1] > 3 * FORGET_S


async def test_a_node_that_names_thousands_makes_others_dial_a_few_at_a_time_and_none_that_is_configured_waits(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    dialing, most, dialed = 0, 0, []

    async def hang(endpoint: Endpoint, _: object, within_s: float, __: object) -> NoReturn:
        nonlocal dialing, most
        dialed.append((endpoint.host, trio.current_time()))
        rumoured = endpoint.host != "configured"
        dialing += rumoured
        most = max(most, dialing)
        try:
            await trio.sleep(within_s)
        finally:
            dialing -= rumoured
        raise PeerLost("nobody there")

    a = Node("a", port=None, section=evolve(QUICK, retry_min_s=1e6, retry_max_s=1e6))
    a.links.dial = hang
    await nursery.start(a.run)
    names = tuple(Neighbour(f"n{number}", f"h{number}:1") for number in range(4000))
    a.directory.merge_state("far", NodeState(neighbours=names))
    await trio.sleep(1e-3)
    assert len(dialed) == RUMOUR_DIALS_MAX
    a.directory.configure("b", "configured:1")
    a.directory.notify()
    await trio.sleep(1e-3)
    assert [host for host, _ in dialed[RUMOUR_DIALS_MAX:]] == ["configured"]
    rounds = -(-UNCONFIRMED_BY_NODE_MAX // RUMOUR_DIALS_MAX)
    await trio.sleep(rounds * QUICK.handshake_s)
    assert (most, len(dialed)) == (RUMOUR_DIALS_MAX, 1 + UNCONFIRMED_BY_NODE_MAX), "each once, the last ones too"


async def test_a_node_that_only_others_have_named_lets_the_next_be_dialed_once_it_has_greeted(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    carried: list[str] = []

    async def greeted(_: Mesh, __: str, name: str, ___: None) -> tuple[str, Incarnation]:
        return name, Incarnation()

    async def carry(_: CarriedLinks, peer: str, *__: object) -> None:
        carried.append(peer)
        await trio.sleep_forever()

    async def dial(_: object, __: object, ___: float, talk: Callable[[Any], Awaitable[None]]) -> None:
        await talk(None)

    monkeypatch.setattr(Mesh, "greet", greeted)
    monkeypatch.setattr(CarriedLinks, "carry", carry)
    a = Node("a", port=None)
    a.links.dial = dial
    await nursery.start(a.run)
    names = tuple(Neighbour(f"n{number}", f"h{number}:1") for number in range(2 * RUMOUR_DIALS_MAX))
    a.directory.merge_state("far", NodeState(neighbours=names))
    await trio.sleep(1)
    assert sorted(carried) == sorted(neighbour.name for neighbour in names)
