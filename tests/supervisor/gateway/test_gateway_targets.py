"""The targets of a request: its own, those of its headers, and those of its key, whichever API it comes by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from trio.testing import MockClock

from protocol.messages.generation import RoutingHints
from tests.rig.gateway import Rig, chat, create, gateway_rig, post, text
from tests.rig.keys import as_
from tests.rig.sockets import last_event, whole
from tests.supervisor.gateway.test_gateway_keys import locked

HEADERS = {"x_slo_ttft_ms": "300", "x_slo_tpot_ms": "30"}
WANTED: list[tuple[dict[str, Any], dict[str, str], RoutingHints | None]] = [
    ({}, {}, None),
    ({"ttft_target_ms": None}, {}, None),
    ({"ttft_target_ms": 0}, {}, RoutingHints(ttft_target_ms=0.0)),
    ({"itl_target_ms": 2.5}, {}, RoutingHints(itl_target_ms=2.5)),
    ({}, HEADERS, RoutingHints(ttft_target_ms=300.0, itl_target_ms=30.0)),
    ({"ttft_target_ms": 0}, HEADERS, RoutingHints(ttft_target_ms=0.0, itl_target_ms=30.0)),
    ({"ttft_target_ms": 5, "itl_target_ms": 0}, HEADERS, RoutingHints(ttft_target_ms=5.0, itl_target_ms=0.0)),
]


@pytest.mark.parametrize(("fields", "headers", "hints"), WANTED)
async def test_every_api_takes_targets_from_the_body_and_from_headers(
    fields: dict[str, Any], headers: dict[str, str], hints: RoutingHints | None, rather_slow: MockClock
) -> None:
    async with gateway_rig() as rig:
        client = await rig.client()
        model: dict[str, Any] = {"model": "tiny"}
        bodies = [
            post(chat(**fields), **headers),
            post(chat(stream=True, **fields), **headers),
            post(model | {"prompt": "n=5"} | fields, "/v1/completions", **headers),
            post(model | {"input": "n=5"} | fields, "/v1/responses", **headers),
            post(model | {"input": "n=5", "stream": True} | fields, "/v1/responses", **headers),
        ]
        for body in bodies:
            assert (await client.ask(body)).status == 200
        assert (await client.upgrade(**headers)).status == 101
        assert (await whole(client, create(**fields), create(**fields)))["status"] == "completed"
        known = [request.hints or RoutingHints() for request in rig.worker.asked]
        assert [evolve(each, session="") for each in known] == [hints or RoutingHints()] * 7
        assert [request.hints for request in rig.worker.asked][:5] == [hints] * 5, "None if there is nothing to say"


async def test_all_choices_of_a_request_have_its_targets(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        client = await rig.client()
        assert (await client.ask(text(["n=5", "n=6"], n=2, ttft_target_ms=7))).status == 200
        assert [request.hints for request in rig.worker.asked] == [RoutingHints(ttft_target_ms=7.0)] * 4


async def test_the_targets_of_a_key_are_for_requests_that_name_none(tmp_path: Path, rather_slow: MockClock) -> None:
    async with locked(tmp_path, "ttft_target_ms = 0", "itl_target_ms = 12.5") as rig:
        client = await rig.client()
        own: dict[str, Any] = {"ttft_target_ms": 9}
        for data in (post(chat(), **as_("alice")), post(chat(), **HEADERS, **as_("alice")), post(chat(), **as_("bob"))):
            assert (await client.ask(data)).status == 200
        assert (await client.ask(post(chat(**own), **as_("alice")))).status == 200
        assert [request.hints for request in rig.worker.asked] == [
            RoutingHints(ttft_target_ms=0.0, itl_target_ms=12.5),
            RoutingHints(ttft_target_ms=300.0, itl_target_ms=30.0),
            None,
            RoutingHints(ttft_target_ms=9.0, itl_target_ms=12.5),
        ]


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "4000000", "1e2"])
async def test_a_wrong_header_is_refused_by_its_name(value: str, rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        client = await rig.client()
        for data in (post(chat(), x_slo_ttft_ms=value), post({"model": "tiny", "input": "Hi"}, "/v1/responses")):
            reply = await client.ask(data)
            expected = (400, "x-slo-ttft-ms") if b"x-slo" in data else (200, None)
            assert (reply.status, None if reply.status == 200 else reply.error["param"]) == expected
        refused = await client.upgrade(x_slo_tpot_ms=value)
        assert (refused.status, refused.error["param"]) == (400, "x-slo-tpot-ms")
        assert len(rig.worker.asked) == 1


READS: list[tuple[set[str], dict[str, Any], dict[str, str], str]] = [
    (set(), {"ttft_target_ms": 0}, {}, "ttft_target_ms"),
    (set(), {"itl_target_ms": 2.5}, {}, "itl_target_ms"),
    ({"ttft_target_ms"}, {"ttft_target_ms": 5, "itl_target_ms": 2.5}, {}, "itl_target_ms"),
    ({"itl_target_ms"}, {"ttft_target_ms": 5, "itl_target_ms": 2.5}, {}, "ttft_target_ms"),
    (set(), {}, {"x_sgl_ttft_slo_ms": "300"}, "x-sgl-ttft-slo-ms"),
    ({"ttft_target_ms"}, {}, HEADERS, "x-slo-tpot-ms"),
    (set(), {}, {"x_sgl_tps_slo": "50"}, "x-sgl-tps-slo"),
]


@pytest.mark.parametrize(("reads", "fields", "headers", "param"), READS)
async def test_a_target_that_the_model_does_not_read_is_refused_by_its_name(
    reads: set[str], fields: dict[str, Any], headers: dict[str, str], param: str, rather_slow: MockClock
) -> None:
    async with gateway_rig() as rig:
        let_read(rig, reads)
        client = await rig.client()
        for data in (post(chat(**fields), **headers), post(chat(stream=True, **fields), **headers)):
            reply = await client.ask(data)
            assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
            assert reply.error["param"] == param
        assert (await client.upgrade(**headers)).status == 101
        assert (await last_event(client, create(**fields)))["error"]["param"] == param
        assert not rig.worker.asked


async def test_a_key_has_its_targets_at_models_that_read_them(tmp_path: Path, rather_slow: MockClock) -> None:
    async with locked(tmp_path, "ttft_target_ms = 0", "itl_target_ms = 12.5") as rig:
        client = await rig.client()
        for reads in (set[str](), {"ttft_target_ms"}, {"itl_target_ms"}):
            let_read(rig, reads)
            assert (await client.ask(post(chat(), **as_("alice")))).status == 200
        assert [request.hints for request in rig.worker.asked] == [
            None,
            RoutingHints(ttft_target_ms=0.0),
            RoutingHints(itl_target_ms=12.5),
        ]


def let_read(rig: Rig, targets: set[str]) -> None:
    """Let the grids of the model read these targets alone."""
    served = rig.gateway.runner.served["tiny"]
    rig.gateway.runner.served = {"tiny": evolve(served, targets=frozenset(targets))}
