"""Keys, their limits and TLS at a running gateway: what clients get, and what is logged."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from protocol.messages.cluster import Reloaded
from supervisor.cluster.directory import Directory
from supervisor.config.certificate import Certificate
from supervisor.config.sections import NodeSection
from supervisor.gateway.keys.key_sources import ADMIN, KeySources
from supervisor.gateway.keys.keys import Keys, KeyStatistics
from supervisor.gateway.listening import GatewayPort
from supervisor.node import node
from supervisor.node.reload.reload import Reloader
from supervisor.processes.process import GracePeriods
from supervisor.processes.signals import handle_signals
from supervisor.telemetry.logs import Terminal
from tests.rig import certificate
from tests.rig.files import read_inline
from tests.rig.gateway import SECRET, Client, Reply, Rig, at_rest, chat, create, gateway_rig, head, post
from tests.rig.keys import as_, sha
from tests.rig.sockets import last_event, whole


@asynccontextmanager
async def locked(tmp_path: Path, *lines: str, **limits: Any) -> AsyncIterator[Rig]:
    """Run a gateway with keys of Alice, Bob and an admin; `lines` are the limits of Alice."""
    path = tmp_path / "keys.toml"
    sections = {"alice": "\n".join(lines), "bob": "", "admin": "admin = true"}
    path.write_text(
        "".join(f'[key.{name}]\nsha256 = "{sha(f"{name}-{SECRET}")}"\n{text}\n' for name, text in sections.items())
    )
    keys = Keys(KeySources(path))
    keys.load()
    async with gateway_rig(**limits) as rig:
        rig.gateway.keys = keys
        yield rig
        await at_rest_soon(rig)


async def at_rest_soon(rig: Rig) -> None:
    rig.hang_up()
    await at_rest(rig)
    assert set(rig.gateway.keys.statistics().values()) <= {KeyStatistics(0, 0)}


async def eventually(ask: Callable[[], Awaitable[Reply]]) -> None:
    """Ask until the answer is 200: it takes a moment until the gateway notices that a client has left."""
    with trio.fail_after(5):
        while (await ask()).status != 200:
            await trio.lowlevel.checkpoint()


async def test_without_a_key_only_health_and_readiness_are_answered(tmp_path: Path) -> None:
    async with locked(tmp_path) as rig:
        for data in (post(chat()), head("GET", "/v1/models"), head("GET", "/nothing"), head("GET", "/metrics")):
            client = await rig.client()
            reply = await client.ask(data)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready"):
            assert (await (await rig.client()).ask(head("GET", path))).status == 200
        refused = await (await rig.client()).upgrade()
        assert refused.status == 401
        assert not rig.worker.prompts


async def test_a_probe_with_the_admin_key_counts_for_no_key_where_clients_need_none() -> None:
    async with gateway_rig() as rig:
        rig.gateway.keys = Keys(KeySources(None, {ADMIN: f"admin-{SECRET}"}))
        rig.gateway.keys.load()
        for path in ("/health", "/ready"):
            assert (await (await rig.client()).ask(head("GET", path, **as_("admin")))).status == 200
        assert rig.gateway.keys.statistics() == {"admin": KeyStatistics(0, 0)}
        await at_rest_soon(rig)


async def test_a_wrong_key_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    async with locked(tmp_path) as rig:
        client = await rig.client()
        reply = await client.ask(head("POST", "/v1/chat/completions", content_length=4_000_000, **as_("eve")))
        assert (reply.status, reply.headers["connection"]) == (401, "close")


async def test_a_key_is_accepted_over_http_and_websocket_and_logged_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with locked(tmp_path) as rig:
        with caplog.at_level(logging.INFO):
            client = await rig.client()
            assert (await client.ask(post(chat(f"n=5 {SECRET}"), **as_("alice")))).status == 200
            assert (await client.ask(head("GET", "/v1/models", x_api_key=f"bob-{SECRET}"))).status == 200
            other = await rig.client()
            assert (await other.upgrade(**as_("bob"))).status == 101
            assert (await whole(other, create("n=3")))["status"] == "completed"
            await at_rest_soon(rig)
        lines = [vars(record) for record in caplog.records if record.name == "espalier.requests"]
        assert [(line["key"], line["request"], line["status"]) for line in lines] == [
            ("alice", "POST /v1/chat/completions", 200),
            ("bob", "GET /v1/models", 200),
            ("bob", "response.create", 200),
        ]
        first = lines[0]
        assert (first["outcome"], first["completion_tokens"], first["model"]) == ("stop", 5, "tiny")
        assert 0 <= first["waited_s"] <= first["first_token_s"] <= first["duration_s"]
        assert SECRET not in str([vars(record) for record in caplog.records])


async def test_metrics_take_an_admin_key(tmp_path: Path) -> None:
    async with locked(tmp_path) as rig:
        client = await rig.client()
        assert (await client.ask(head("GET", "/metrics", **as_("alice")))).error["code"] == "forbidden"
        assert (await client.ask(head("GET", "/metrics", **as_("admin")))).status == 200


async def test_a_request_beyond_the_rate_of_its_key_gets_429_with_retry_after(tmp_path: Path) -> None:
    async with locked(tmp_path, "rate_per_s = 0.01", "burst = 2") as rig:
        client = await rig.client()
        replies = [await client.ask(post(chat(), **as_("alice"))) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert replies[2].error["type"] == "rate_limit_error"
        assert 90 <= int(replies[2].headers["retry-after"]) <= 100
        assert replies[2].headers["x-should-retry"] == "true"
        assert (await client.ask(post(chat(), **as_("bob")))).status == 200


async def test_refused_requests_are_charged_to_the_rate_limit(tmp_path: Path) -> None:
    async with locked(tmp_path, "rate_per_s = 0.01", "burst = 2") as rig:
        client = await rig.client()
        replies = [await client.ask(post(body, **as_("alice"))) for body in (b"[", chat(model="no"), chat())]
        assert [reply.status for reply in replies] == [400, 404, 429]


async def test_refused_messages_are_charged_to_the_rate_limit_and_cancels_are_not(tmp_path: Path) -> None:
    async with locked(tmp_path, "rate_per_s = 0.01", "burst = 2") as rig:
        socket = await rig.client()
        await socket.upgrade(**as_("alice"))
        await socket.say({"type": "response.cancel"})  # of nothing
        messages: tuple[object, ...] = ("[", create("n=2", model="no"), create("n=2"))
        events = [await last_event(socket, message) for message in messages]
        codes = [event["error"]["code"] for event in events]
        assert codes == ["invalid_request", "model_not_found", "rate_limit_exceeded"]
        assert events[-1]["status"] == 429


async def test_a_request_waits_and_runs_with_the_priority_that_its_key_gives_it(
    tmp_path: Path, rather_slow: MockClock
) -> None:
    async with locked(tmp_path, "priority = 3", requests_max=1) as rig:
        clients = [await rig.client() for _ in range(4)]
        for client, key, priority in zip(clients, ("bob", "bob", "alice", "alice"), (0, 9, -2, 9), strict=True):
            await client.send(post(chat("n=2 s=0.5", priority=priority), **as_(key)))
            await trio.sleep(0.1)
        for client in clients:
            assert (await client.reply()).status == 200
        assert [request.priority for request in rig.worker.asked] == [0, 3, 0, -2]


async def test_a_client_that_leaves_frees_its_place_in_the_concurrency_of_its_key(tmp_path: Path) -> None:
    async with locked(tmp_path, "concurrency_max = 1") as rig:
        slow = await rig.client()
        await slow.send(post(chat("n=500 s=0.05", stream=True), **as_("alice")))
        await rig.worker.began.wait()
        client = await rig.client()
        refused = await client.ask(post(chat(), **as_("alice")))
        assert (refused.status, refused.error["code"]) == (429, "concurrency_limit_exceeded")
        assert (await client.ask(post(chat(), **as_("bob")))).status == 200
        await slow.stream.aclose()
        await eventually(lambda: client.ask(post(chat(), **as_("alice"))))


async def test_a_revoked_key_is_refused_at_its_next_request(tmp_path: Path) -> None:
    async with locked(tmp_path) as rig:
        client, socket = await rig.client(), await rig.client()
        assert (await client.ask(post(chat(), **as_("alice")))).status == 200
        assert (await socket.upgrade(**as_("alice"))).status == 101
        path = tmp_path / "keys.toml"
        path.write_text("[key." + path.read_text().split("[key.", 2)[2])  # without the first, who is Alice
        await rig.gateway.reload(read_inline)
        assert (await client.ask(post(chat(), **as_("alice")))).status == 401
        assert (await last_event(socket, create("n=2")))["error"]["code"] == "invalid_api_key"
        assert (await (await rig.client()).ask(post(chat(), **as_("bob")))).status == 200


# TLS ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def secured(**limits: Any) -> AsyncIterator[Rig]:
    async with gateway_rig(**limits) as rig:
        rig.gateway.port.tls = Certificate(*certificate.files()).context()
        yield rig
        await at_rest_soon(rig)


async def secure_client(rig: Rig, receive_buffer: int | None = None) -> Client:
    raw = await rig.connect(receive_buffer)
    stream = trio.SSLStream(raw, certificate.trusting(), server_hostname="localhost", https_compatible=True)
    await stream.do_handshake()
    return Client(stream)


async def test_http_and_websocket_work_over_tls() -> None:
    async with secured() as rig:
        client = await secure_client(rig)
        assert (await client.ask(post(chat("n=5")))).json["choices"][0]["message"]["content"]
        streamed = await client.ask(post(chat("n=50", stream=True)))
        assert streamed.whole
        assert streamed.events[-1] == "[DONE]"
        other = await secure_client(rig)
        assert (await other.upgrade()).status == 101
        await other.say(create("n=50"))
        events = await other.events()
        assert events[-1]["type"] == "response.completed"
        deltas = "".join(event.get("delta", "") for event in events if event["type"] == "response.output_text.delta")
        assert deltas == events[-1]["response"]["output"][0]["content"][0]["text"]


async def test_the_request_of_a_client_that_leaves_is_aborted_over_tls() -> None:
    async with secured() as rig:
        client = await secure_client(rig)
        await client.send(post(chat("n=500 s=0.05", stream=True)))
        await rig.worker.began.wait()
        await client.stream.transport_stream.aclose()
        await at_rest(rig)
        assert rig.worker.left == 1


async def test_a_client_without_tls_gets_nothing_and_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with secured(head_s=0.3) as rig:
        with caplog.at_level(logging.INFO):
            plain = await rig.client()
            await plain.send(head("GET", "/health"))
            with trio.fail_after(5):
                assert b"HTTP" not in await rest(plain)
                mute = await rig.client()  # says nothing at all
                assert await rest(mute) == b""
                half = await rig.client()
                await half.send(b"\x16\x03\x01\x02\x00")
                assert b"HTTP" not in await rest(half)
        assert not caplog.records
        assert (await (await secure_client(rig)).ask(head("GET", "/health"))).status == 200


async def rest(client: Client) -> bytes:
    while await client.more():
        pass
    return client.buffer


async def test_a_new_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    async with secured() as rig:
        rig.gateway.port.certificate = Certificate(tmp_path / "c.pem", tmp_path / "k.pem")
        before, client = rig.gateway.port.tls, await secure_client(rig)
        await rig.gateway.reload(read_inline)
        assert rig.gateway.port.tls is before  # there are no files
        certificate.make(tmp_path / "c.pem", tmp_path / "k.pem")
        await rig.gateway.reload(read_inline)
        assert rig.gateway.port.tls is not before
        assert (await client.ask(head("GET", "/health"))).status == 200
        with pytest.raises(trio.BrokenResourceError):  # trusts the old one
            await secure_client(rig)


async def test_a_connection_beyond_connections_max_is_closed_without_a_tls_handshake() -> None:
    async with secured(connections_max=1) as rig:
        first = await secure_client(rig)
        assert (await first.ask(head("GET", "/health"))).status == 200
        with pytest.raises(trio.BrokenResourceError):
            await secure_client(rig)
        assert b'espalier_refusals_total{code="overloaded"} 1.0' in rig.metrics.render({})
        await first.stream.aclose()
        with trio.fail_after(5):
            while rig.gateway.connections:  # noqa: ASYNC110  # a gateway has no event for one that leaves
                await trio.sleep(0.01)
        assert (await (await secure_client(rig)).ask(head("GET", "/health"))).status == 200


# A hang-up ------------------------------------------------------------------------------------------


UNUSED: Any = None  # what a hang-up does not reach


class Reloading(Reloader):
    """A reloader with a function in place of its file."""

    def __init__(self, reload: Callable[[], Awaitable[object]]) -> None:
        loaded: Any = SimpleNamespace(cluster=SimpleNamespace(node={"main": NodeSection()}))
        super().__init__("main", loaded, UNUSED, {}, UNUSED)
        self.does = reload

    async def _reload(self) -> Reloaded:
        await self.does()
        return Reloaded()


def terminal(*, gone: bool, live: bool) -> Terminal:
    stream: Any = SimpleNamespace(isatty=lambda: not gone)
    return Terminal(stream, live)


@pytest.mark.parametrize(("live", "gone"), [(False, False), (True, False), (True, True)])
async def test_a_hang_up_reloads_the_keys_unless_the_terminal_is_gone(
    live: bool, gone: bool, autojump_clock: MockClock
) -> None:
    done: list[str] = []
    gate = SimpleNamespace(wait_empty=trio.lowlevel.checkpoint)

    def drain() -> None:
        gateway.draining = True
        done.append("drain")

    waits = SimpleNamespace(wait_idle=trio.lowlevel.checkpoint, wait_closed=trio.lowlevel.checkpoint)
    gateway = SimpleNamespace(
        gate=gate, port=GatewayPort(), draining=False, drain=drain, abort=lambda: 0, connections=waits
    )
    runtime: Any = SimpleNamespace(grace=GracePeriods())

    async def reload() -> None:
        await trio.lowlevel.checkpoint()
        done.append("reload")

    assembly: Any = SimpleNamespace(directory=Directory("main"), gateway=gateway, links=None)
    reloader, shown = Reloading(reload), terminal(gone=gone, live=live)
    async with trio.open_nursery() as nursery:
        main_node = node.Node(UNUSED, assembly, runtime, shown, lambda: 30.0, nursery=nursery, reloader=reloader)
        await nursery.start(handle_signals, main_node)
        nursery.start_soon(reloader.run)
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
            await trio.testing.wait_all_tasks_blocked()
            if gone:
                break
        assert done == (["drain"] if gone else ["reload", "reload"])
        assert main_node.exit_code == 0
        nursery.cancel_scope.cancel()
