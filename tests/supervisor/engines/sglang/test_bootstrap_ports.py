"""Each life of a prefill has another bootstrap port."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn

import pytest
import trio
from attrs import evolve

from actors.engines.sglang.boot_message import build
from actors.engines.sglang.spec import SglangSpec
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from supervisor.engines.sglang import bootstrap_ports
from supervisor.engines.sglang.bootstrap_ports import BootstrapPorts, ports
from supervisor.engines.sglang.section import BOOTSTRAP_PORTS

PREFILL = SglangSpec("p", "/models/x", "cpu", 4, 4096, leg=Leg.PREFILL, bootstrap_port=20_400)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ports at which somebody listens; here nobody does in truth."""
    taken: set[int] = set()

    def bind_all(addresses: Sequence[object], port: int) -> list[socket.socket]:
        assert addresses
        if port in taken:
            raise OSError("it is taken")
        return []

    monkeypatch.setattr(bootstrap_ports, "bind_all", bind_all)
    return taken


@pytest.mark.parametrize("life_s", [0.1, 1.0, 7.0, BOOTSTRAP_PORTS, 10 * BOOTSTRAP_PORTS])
async def test_a_life_is_met_where_none_of_the_lives_before_it_was_however_long_they_were(life_s: float) -> None:
    lives = BootstrapPorts(PREFILL, count(1000.7, life_s).__next__)
    met = [await lives.next_port() for _ in range(BOOTSTRAP_PORTS)]
    assert sorted(met) == list(ports(PREFILL)) == list(range(20_400, 20_400 + BOOTSTRAP_PORTS))  # type: ignore[type-var]
    assert await lives.next_port() == met[0]


async def test_the_lives_of_processes_that_follow_each_other_within_half_a_minute_are_met_apart() -> None:
    met = {
        await BootstrapPorts(PREFILL, partial(float, at_s)).next_port() for at_s in range(1000, 1000 + BOOTSTRAP_PORTS)
    }
    assert len(met) == BOOTSTRAP_PORTS


async def test_a_taken_port_is_skipped_and_a_start_without_a_free_one_fails(taken: set[int]) -> None:
    last = 20_400 + BOOTSTRAP_PORTS - 1
    taken |= {port for port in ports(PREFILL) if port not in {None, last}}
    lives = BootstrapPorts(PREFILL, lambda: 0.0)
    assert await lives.next_port() == await lives.next_port() == last
    taken.add(last)
    with pytest.raises(StartFailed, match=r"none of the ports 20400 to 20431 of .* is free"):
        await lives.next_port()


@pytest.mark.parametrize(("host", "listens_at"), [("10.0.0.5", "10.0.0.5"), ("::1", "::1"), ("host-5", "")])
def test_a_leg_listens_where_others_find_it_and_at_no_name(host: str, listens_at: str) -> None:
    leg = build(evolve(PREFILL, host=host), "/tmp/x")
    assert (leg.arguments["host"], leg.environment["SGLANG_HOST_IP"]) == (host, listens_at)
    whole = evolve(PREFILL, leg=Leg.BOTH, host=host, bootstrap_port=None)
    assert build(whole, "/tmp/x").environment["SGLANG_HOST_IP"] == "127.0.0.1"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
async def test_a_name_is_resolved_outside_of_the_event_loop_to_addresses_of_either_family(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily
) -> None:
    address = ("10.0.0.5", 0) if family == socket.AF_INET else ("fd00::5", 0, 0, 0)
    tried: list[tuple[Sequence[object], int]] = []

    class OneAddress(trio.abc.HostnameResolver):
        async def getaddrinfo(self, host: object, port: object, asked: int = 0, *_: object) -> Any:
            await trio.lowlevel.checkpoint()
            assert (host, asked) == (b"prefill-0.nodes", 0)
            return [(family, socket.SOCK_STREAM, 6, "", address)]

        async def getnameinfo(self, *_: object) -> NoReturn:
            raise NotImplementedError

    def bind_all(addresses: Sequence[object], port: int) -> list[socket.socket]:
        tried.append((addresses, port))
        return []

    monkeypatch.setattr(bootstrap_ports, "bind_all", bind_all)
    trio.socket.set_custom_hostname_resolver(OneAddress())
    lives = BootstrapPorts(evolve(PREFILL, host="prefill-0.nodes"), lambda: 0.0)
    port = await lives.next_port()
    assert tried == [([(family, address)], port)]


async def test_a_host_that_cannot_be_found_fails_the_start_with_a_sentence_about_it() -> None:
    class Unknown(trio.abc.HostnameResolver):
        async def getaddrinfo(self, *_: object) -> NoReturn:
            await trio.lowlevel.checkpoint()
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        async def getnameinfo(self, *_: object) -> NoReturn:
            raise NotImplementedError

    trio.socket.set_custom_hostname_resolver(Unknown())
    with pytest.raises(StartFailed, match=r"^engine p: its host nowhere cannot be found: Name or service not known$"):
        await BootstrapPorts(evolve(PREFILL, host="nowhere"), lambda: 0.0).next_port()
