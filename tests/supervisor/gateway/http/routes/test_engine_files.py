"""`GET /engine_files/NAME` sends a file of one engine part by part, and never one that looks whole and is not."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.errors import BadRequest, EngineLost, RequestError
from protocol.messages.engine_files import FilePart, ReadFile
from protocol.messages.kind import Message
from tests.rig.gateway import gateway_client, head

DATA = bytes(range(256)) * 40


class Files:
    """Engines with one file, of which the second half cannot be read while it is `lost`."""

    lost = False

    async def operate(self, request: Message, engine: str | None) -> Mapping[str, Message | RequestError]:
        await trio.lowlevel.checkpoint()
        assert isinstance(request, ReadFile)
        assert engine == "main/one"
        if request.name != "a.gz":
            return {engine: BadRequest(f"there is no file {request.name!r}", param="name")}
        if self.lost and request.offset > len(DATA) // 2:
            return {engine: EngineLost("it is gone")}
        return {engine: FilePart(request.name, len(DATA), DATA[request.offset : request.offset + 3000])}


async def test_a_file_is_sent_as_it_is(rather_slow: MockClock) -> None:
    files = Files()
    async with gateway_client() as (rig, client):
        rig.gateway.administration = evolve(rig.gateway.administration, operate=files.operate)
        reply = await client.ask(head("GET", "/engine_files/a.gz?engine=main/one"))
        assert (reply.status, reply.body, reply.whole) == (200, DATA, True)
        asked = head("HEAD", "/engine_files/a.gz?engine=main/one")
        reply = await client.ask(asked)
        assert (reply.status, reply.body, reply.headers["content-length"]) == (200, b"", str(len(DATA)))
        for path, status in (("/engine_files/b?engine=main/one", 404), ("/engine_files/a.gz", 400)):
            assert (await client.ask(head("GET", path))).status == status
        foreign = head("GET", "/engine_files/a.gz?engine=main/one", sec_fetch_site="cross-site")
        assert (await client.ask(foreign)).status == 403


async def test_a_file_that_is_lost_in_the_middle_has_no_end(rather_slow: MockClock) -> None:
    files = Files()
    files.lost = True
    async with gateway_client() as (rig, client):
        rig.gateway.administration = evolve(rig.gateway.administration, operate=files.operate)
        reply = await client.ask(head("GET", "/engine_files/a.gz?engine=main/one"))
        assert (reply.status, reply.whole) == (200, False)
        assert DATA.startswith(reply.body)
        assert len(reply.body) < len(DATA)
