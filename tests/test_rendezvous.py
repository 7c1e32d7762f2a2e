"""Each life of a prefill is met at another port."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
from attrs import evolve

from actors.engines.sglang.settings import EngineSpec
from protocol.cluster import Leg
from protocol.errors import StartFailed
from supervisor.rendezvous import PORTS, for_a_new_life

PREFILL = EngineSpec("p", "/models/x", "cpu", 4, 4096, leg=Leg.PREFILL, bootstrap_port=20_400)


def test_no_two_lives_within_half_a_minute_are_met_at_one_port():
    ports = [for_a_new_life(PREFILL, 1000.7 + second).bootstrap_port for second in range(PORTS)]
    assert len(set(ports)) == PORTS
    assert {port - 20_400 for port in ports} == set(range(PORTS))


def test_a_port_that_is_taken_is_passed_over_and_none_left_is_said():
    with ExitStack() as stack:
        first = for_a_new_life(PREFILL, 0.0).bootstrap_port
        stack.enter_context(socket.create_server(("127.0.0.1", first)))
        assert for_a_new_life(PREFILL, 0.0).bootstrap_port == first + 1
        for port in range(first + 1, first + PORTS):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(StartFailed, match=r"none of the ports 20400 to 20431 of .* is free"):
            for_a_new_life(PREFILL, 0.0)


def test_who_has_no_port_of_its_own_is_left_alone():
    assert for_a_new_life(evolve(PREFILL, leg=Leg.DECODE, bootstrap_port=None), 5.0).bootstrap_port is None
    spanning = evolve(PREFILL, nodes=2, meet="127.0.0.1:1")
    assert for_a_new_life(spanning, 5.0) is spanning
