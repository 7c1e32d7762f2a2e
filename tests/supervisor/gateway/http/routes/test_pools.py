"""`GET /pools` is for operators."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve
from trio.testing import MockClock

from tests.rig.gateway import gateway_client, head
from tests.rig.keys import as_
from tests.supervisor.gateway.test_gateway_keys import locked


async def test_the_pools_are_shown_as_they_are(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        assert (await client.ask(head("GET", "/pools"))).json == {"pools": [], "grids": []}
        rig.gateway.administration = evolve(
            rig.gateway.administration, pools=lambda: {"pools": [{"name": "quick"}], "grids": []}
        )
        assert (await client.ask(head("GET", "/pools"))).json["pools"] == [{"name": "quick"}]


async def test_pools_take_an_admin_key(tmp_path: Path, rather_slow: MockClock) -> None:
    async with locked(tmp_path) as rig:
        client = await rig.client()
        assert (await client.ask(head("GET", "/pools", **as_("alice")))).status == 403
        assert (await client.ask(head("GET", "/pools", **as_("admin")))).status == 200
