"""The inside of a cluster: names of nodes and engines, and addresses, which operators see and clients do not."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import define, evolve
from trio.testing import MockClock

from actors.kit.calls import Answer
from protocol.errors import (
    ActorLost,
    Draining,
    EngineLost,
    HandOffFailed,
    InternalError,
    LinkLost,
    LinkReplaced,
    NotReady,
    RequestError,
)
from protocol.messages.generation import Finished, Generate, RouteTaken, Started, Tokens
from supervisor.gateway.keys.key_sources import ADMIN, KeySources
from supervisor.gateway.keys.keys import Keys
from tests.rig.gateway import SECRET, Rig, Worker, chat, create, gateway_rig, head, leave_all, post
from tests.rig.keys import as_
from tests.rig.log_records import log_records
from tests.rig.sockets import last_event
from tests.supervisor.gateway.test_gateway_keys import locked

INSIDE = "prefill node-7/engine-9 of 10.1.2.3:8998 is lost"
NAMING = (ActorLost, Draining, EngineLost, HandOffFailed, InternalError, LinkLost, LinkReplaced, NotReady)


@define(eq=False)
class LosingWorker(Worker):
    """A worker that loses each answer at once, or behind its first token."""

    error: type[RequestError] = EngineLost
    late: bool = False

    async def _answer(self, request: Generate, answer: Answer[Started | Tokens, Finished]) -> None:
        if self.late:
            answer.put(Started(0), 0)
            answer.put(Tokens((70,)), 1)
        answer.fail(self.error(INSIDE))


async def bodies(rig: Rig, key: str) -> AsyncIterator[bytes]:
    """Yield what a key is answered by each API."""
    for data in (
        post(chat(), **as_(key)),
        post(chat(stream=True), **as_(key)),
        post({"model": "tiny", "input": "n=5"}, "/v1/responses", **as_(key)),
        post({"model": "tiny", "input": "n=5", "stream": True}, "/v1/responses", **as_(key)),
    ):
        yield (await (await rig.client()).ask(data)).body
    socket = await rig.client()
    assert (await socket.upgrade(**as_(key))).status == 101
    yield json.dumps(await last_event(socket, create())).encode()


@pytest.mark.parametrize(("error", "late"), [*((error, False) for error in NAMING), (EngineLost, True)])
async def test_errors_name_what_is_inside_to_operators_alone(
    error: type[RequestError], *, late: bool, tmp_path: Path, rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with locked(tmp_path, worker=LosingWorker(error=error, late=late)) as rig:
        async for body in bodies(rig, "alice"):
            assert error.code.encode() in body
            assert (error.outline or "").encode() in body
            assert b"node-7" not in body
        async for body in bodies(rig, "admin"):
            assert INSIDE.encode() in body
        await leave_all(rig)
    lines = [line for line in log_records(caplog) if line.name == "espalier.requests"]
    assert [line.outcome for line in lines] == [error.code] * 10, "each is logged once"
    assert {line.reason for line in lines} == {INSIDE}, "with what an operator has to know"


def test_an_error_has_one_sentence_for_all_unless_it_names_what_is_inside() -> None:
    for error in NAMING:
        assert error(INSIDE).client_detail == error.outline
    assert RequestError("all may know").client_detail == "all may know"


async def test_the_route_is_shown_to_operators_alone(tmp_path: Path, rather_slow: MockClock) -> None:
    async with locked(tmp_path, worker=Worker(route=RouteTaken("node-7/engine-9", 3))) as rig:
        client = await rig.client()
        for data in (chat(), chat(stream=True)):
            assert "x-route" not in (await client.ask(post(data, **as_("alice")))).headers
            assert "x-route" in (await client.ask(post(data, **as_("admin")))).headers


@asynccontextmanager
async def with_admin_key_alone() -> AsyncIterator[Rig]:
    """Serve clients without a key, and an operator with one."""
    async with gateway_rig(worker=Worker(route=RouteTaken("node-7/engine-9", 3))) as rig:
        rig.gateway.keys = Keys(KeySources(None, {ADMIN: f"admin-{SECRET}"}))
        rig.gateway.keys.load()
        yield rig


async def test_where_clients_need_no_key_the_admin_key_shows_the_route(rather_slow: MockClock) -> None:
    async with with_admin_key_alone() as rig:
        client = await rig.client()
        assert "x-route" not in (await client.ask(post(chat()))).headers
        assert "x-route" not in (await client.ask(post(chat(), **as_("nobody")))).headers
        assert "x-route" in (await client.ask(post(chat(), **as_("admin")))).headers


async def test_server_info_shows_engines_and_limits_to_operators_alone(tmp_path: Path, rather_slow: MockClock) -> None:
    async with locked(tmp_path) as rig:
        info: dict[str, object] = {"version": "1", "models": ["tiny"], "engines": {"node-7/engine-9": {}}}
        rig.gateway.administration = evolve(rig.gateway.administration, server_info=lambda: info | {"ejected": []})
        client = await rig.client()
        reply = await client.ask(head(path="/server_info", **as_("alice")))
        assert reply.json == {"version": "1", "models": ["tiny"]}
        reply = await client.ask(head(path="/server_info", **as_("admin")))
        assert reply.json.keys() == {*info, "ejected", "limits"}


async def test_a_probe_without_a_key_learns_whether_it_is_ready_and_not_why(
    tmp_path: Path, rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with locked(tmp_path) as rig:
        client = await rig.client()
        rig.gateway.probes = evolve(rig.gateway.probes, missing=lambda: "model tiny lacks node-7/eyes")
        assert (await client.ask(head(path="/ready"))).body == b"ready, but some model takes no images and videos\n"
        rig.ready.append("engine node-7/engine-9 is starting")
        caplog.set_level(logging.DEBUG)
        for data in (head(path="/ready"), post(chat(), **as_("alice"))):
            unready = await client.ask(data)
            assert (unready.status, unready.error["code"]) == (503, "not_ready")
            assert "node-7" not in unready.error["message"]
        for data in (head(path="/ready", **as_("admin")), post(chat(), **as_("admin"))):
            assert "node-7" in (await client.ask(data)).error["message"]
    lines = [line for line in log_records(caplog) if line.name == "espalier.requests" and line.outcome == "not_ready"]
    assert {line.reason for line in lines} == {"engine node-7/engine-9 is starting"}
    assert len(lines) == 4
