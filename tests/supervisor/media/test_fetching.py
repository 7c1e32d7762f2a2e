"""Fetches over a scripted network, in virtual time: what is dialed is what was checked, and no server can hold one."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve
from trio.testing import MockClock

from actors.media.media import Allowance
from protocol.errors import BadRequest, Overloaded, RequestError, TooLarge, Unsupported
from supervisor.media import fetching
from supervisor.media.network import SystemNetwork
from tests.rig import certificate
from tests.rig.fake_network import BODY, Serve, Stream, answering, ok, read, redirect, request_of, running


async def test_a_content_is_fetched_from_the_address_that_was_checked(autojump_clock: MockClock) -> None:
    heads: list[bytes] = []

    async def serve(stream: Stream) -> None:
        heads.append(await request_of(stream))
        await stream.send_all(ok())

    async with running() as rig:
        rig.network.servers["8.8.8.8", 80] = serve
        assert await rig.fetch("http://a.example/x.png?y=z") == BODY
        assert rig.network.dialed == ["8.8.8.8 80"]
        lines = heads[0].decode().split("\r\n")
        assert lines[0] == "GET /x.png?y=z HTTP/1.1"
        assert {line.lower() for line in lines[1:5]} >= {"host: a.example", "accept-encoding: identity"}
        assert "user-agent: espalier/test" in [line.lower() for line in lines]


@pytest.mark.parametrize(
    "body",
    [
        ok(),
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,  # until the connection ends
        b"HTTP/1.1 100 Continue\r\n\r\n" + ok(),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"5\r\n" + BODY[:5] + b"\r\n"
        + f"{len(BODY) - 5:x}\r\n".encode() + BODY[5:] + b"\r\n0\r\n\r\n",
    ],
    ids=["length", "end", "informational", "chunked"],
)  # fmt: skip
async def test_every_framing_of_a_body_is_read(body: bytes, autojump_clock: MockClock) -> None:
    async with running() as rig:
        rig.network.servers["8.8.8.8", 80] = answering(body)
        assert await rig.fetch("http://a.example/") == BODY


# Whom nobody may ask --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://c.example/", "https://a.example:8443/", "http://wild.example/", "http://8.8.4.4/"]
)
async def test_a_host_that_is_not_allowed_is_neither_resolved_nor_dialed(url: str, autojump_clock: MockClock) -> None:
    async with running() as rig:
        with pytest.raises(BadRequest, match="this server does not fetch from"):
            await rig.fetch(url)
        assert (rig.network.resolved, rig.network.dialed) == ([], [])


PRIVATE = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fd00::1", "0.0.0.0", "100.64.0.1"]


@pytest.mark.parametrize("address", PRIVATE)
async def test_an_allowed_name_at_a_private_address_is_not_dialed(address: str, autojump_clock: MockClock) -> None:
    async with running() as rig:
        rig.network.names["a.example"] = [[address]]
        with pytest.raises(BadRequest, match=r"^a\.example cannot be reached from this server$"):
            await rig.fetch("http://a.example/")
        assert rig.network.dialed == []


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://[::1]/", "https://127.0.0.1/"])
async def test_an_allowed_private_address_needs_its_network_too(url: str, autojump_clock: MockClock) -> None:
    async with running() as rig:
        with pytest.raises(BadRequest, match="cannot be reached"):
            await rig.fetch(url)
        assert rig.network.dialed == []
    async with running(networks=["127.0.0.0/8", "::1/128"]) as rig:
        with pytest.raises(BadRequest, match="cannot be reached"):
            await rig.fetch(url)
        assert len(rig.network.dialed) == 1


async def test_of_several_addresses_only_public_ones_are_dialed(autojump_clock: MockClock) -> None:
    async with running() as rig:
        rig.network.names["a.example"] = [["127.0.0.1", "2606:4700::1", "8.8.8.8", "10.0.0.1"]]
        rig.network.servers["8.8.8.8", 80] = answering(ok())
        assert await rig.fetch("http://a.example/") == BODY
        assert rig.network.dialed == ["2606:4700::1 80", "8.8.8.8 80"]


async def test_a_name_that_changes_its_answer_gains_nothing(autojump_clock: MockClock) -> None:
    """It is resolved once for each URL, and the address of that answer is dialed."""
    async with running() as rig:
        rig.network.names["a.example"] = [["8.8.8.8"], ["127.0.0.1"]]
        rig.network.servers["8.8.8.8", 80] = answering(redirect("http://a.example/again"))
        rig.network.servers["127.0.0.1", 80] = answering(ok(b"the secret of this machine"))
        with pytest.raises(BadRequest, match="cannot be reached"):
            await rig.fetch("http://a.example/")
        assert rig.network.resolved == ["a.example", "a.example"]
        assert rig.network.dialed == ["8.8.8.8 80"]


REDIRECTS = [
    ("http://127.0.0.1/admin", "cannot be reached"),
    ("http://localhost/admin", "cannot be reached"),
    ("http://[::1]/", "cannot be reached"),
    ("//c.example/", "does not fetch from c.example"),
    ("http://169.254.169.254/latest/meta-data", "does not fetch from 169.254.169.254"),
    ("file:///etc/passwd", "redirects to a file"),
    ("data:image/png;base64,AAAA", "must begin with"),
    ("ftp://a.example/", "must begin with"),
    ("http://user:password@a.example/", "user name"),
    ("http://a.example:22/", "does not fetch from a.example:22"),
    ("", "redirects to nowhere"),
    ("http://[bad", "no valid URL|no URL"),
    ("/model.pt", "pickle"),
]


@pytest.mark.parametrize(("location", "reason"), REDIRECTS, ids=[location or "none" for location, _ in REDIRECTS])
async def test_a_redirect_is_checked_like_a_url(location: str, reason: str, autojump_clock: MockClock) -> None:
    async with running() as rig:
        rig.network.names["localhost"] = [["127.0.0.1"]]
        rig.network.servers["8.8.8.8", 80] = answering(redirect(location))
        with pytest.raises(BadRequest, match=reason):
            await rig.fetch("http://a.example/")
        assert rig.network.dialed == ["8.8.8.8 80"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_up_to_their_limit(status: int, autojump_clock: MockClock) -> None:
    async with running() as rig:
        rig.network.servers["8.8.8.8", 80] = answering(redirect("http://b.example/x/", status))
        rig.network.servers["9.9.9.9", 80] = answering(ok())
        assert await rig.fetch("http://a.example/") == BODY
        rig.network.servers["9.9.9.9", 80] = answering(redirect("http://b.example/x/", status))
        with pytest.raises(BadRequest, match="more than 2 redirects"):
            await rig.fetch("http://a.example/")
        assert len(rig.network.dialed) == 2 + 3


# Servers that are no good ---------------------------------------------------------------------

LARGE = b"x" * 20_000
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BAD: list[tuple[str, Serve, type[RequestError], str]] = [
    ("missing", answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), BadRequest, "with the status 404"),
    ("broken", answering(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"), BadRequest, "with the status 500"),
    ("no content", answering(b"HTTP/1.1 204 No Content\r\n\r\n"), BadRequest, "with the status 204"),
    ("no http", answering(b"SSH-2.0-OpenSSH_9.2\r\n"), BadRequest, "broke the rules of HTTP"),
    ("silence", answering(), BadRequest, "ended its answer too early|closed the connection|broke the rules"),
    ("stated size", answering(HEAD + b"Content-Length: 99999999999\r\n\r\n"), TooLarge, "can have 10,000 bytes"),
    ("real size", answering(HEAD + b"\r\n" + LARGE), TooLarge, "can have 10,000 bytes"),
    ("endless", answering(CHUNKED, *[b"7D0\r\n" + b"x" * 2_000 + b"\r\n"] * 1_000), TooLarge, "can have 10,000 bytes"),
    ("chunks", answering(CHUNKED, *[b"1;" + b"e" * 5_000 + b"\r\nx\r\n"] * 1_000), TooLarge, "can have 10,000 bytes"),
    ("compressed", answering(ok(BODY, "Content-Encoding: gzip")), BadRequest, "encoded body"),
    ("head", answering(HEAD, *[b"X-A: " + b"x" * 1_000 + b"\r\n"] * 1_000), BadRequest, "broke the rules of HTTP"),
    ("informational", answering(*[b"HTTP/1.1 100 Continue\r\n\r\n" * 100] * 1_000), BadRequest, "too small pieces"),
    ("small chunks", answering(CHUNKED, *[b"1\r\nx\r\n" * 100] * 1_000), BadRequest, "too small pieces"),
    ("truncated", answering(HEAD + b"Content-Length: 5000\r\n\r\nabc"), BadRequest, "ended its answer too early"),
    (
        "two lengths",
        answering(HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
        BadRequest,
        "broke the rules",
    ),
    ("slow", answering(HEAD + b"\r\n", *[b"x"] * 1_000, every_s=4.0), BadRequest, "not fetched within 20 s"),
    ("stalls", answering(HEAD + b"\r\nabc", every_s=1_000.0), BadRequest, "or its server paused"),
    ("says nothing", answering(every_s=0.0, closes=False), BadRequest, "or its server paused"),
]


@pytest.mark.parametrize(("name", "serve", "error", "reason"), BAD, ids=[name for name, *_ in BAD])
async def test_a_bad_server_is_an_error_of_whoever_named_it(
    name: str, serve: Serve, error: type[RequestError], reason: str, autojump_clock: MockClock
) -> None:
    async with running() as rig:
        rig.network.servers["8.8.8.8", 80] = serve
        began_at = trio.current_time()
        with pytest.raises(error, match=reason) as caught:
            await rig.fetch("http://a.example/")
        assert type(caught.value) is error
        assert caught.value.fault == "client"
        assert trio.current_time() - began_at <= 20.0


async def test_a_host_that_does_not_answer_is_given_up(autojump_clock: MockClock) -> None:
    async with running() as rig:
        rig.network.connect_s = 1_000.0
        with pytest.raises(BadRequest, match="cannot be reached"):
            await rig.fetch("http://a.example/")
        assert trio.current_time() == pytest.approx(fetching.CONNECT_S)
        rig.network.resolve_s = 1_000.0
        with pytest.raises(BadRequest, match="cannot be reached"):
            await rig.fetch("http://a.example/")
        assert trio.current_time() == pytest.approx(fetching.CONNECT_S + fetching.RESOLVE_S)


async def test_one_keys_dead_name_servers_stop_no_other_key_and_are_not_the_fault_of_the_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight names whose server was silent held all threads: a good URL got 400, and was blamed for it."""
    hangs = threading.Event()

    def look_up(host: str, port: int, **_: object) -> list[object]:
        assert host != "dead.wild.example" or hangs.wait()
        return [(0, 0, 0, "", ("8.8.8.8", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(fetching, "RESOLVE_S", 0.05)
    async with running() as rig:

        class Network(SystemNetwork):
            connect = rig.network.connect

        network: SystemNetwork = Network()
        fetcher = evolve(rig.fetcher, network=network)
        rig.network.servers["8.8.8.8", 80] = answering(ok())
        for error in [BadRequest] * 6 + [Overloaded] * 2:
            with pytest.raises(error):
                await fetcher.fetch("http://dead.wild.example/", Allowance(10_000, "greedy"))
        content = await fetcher.fetch("http://a.example/", Allowance(10_000, "alice"))
        assert read(content) == BODY
        content.close()
        hangs.set()
        with trio.fail_after(60):
            while network.threads.budget.taken:  # noqa: ASYNC110  # a thread reports its end to no task
                await trio.sleep(0.01)


async def test_a_name_that_does_not_exist_looks_like_one_that_may_not_be_asked(autojump_clock: MockClock) -> None:
    async with running() as rig:
        rig.network.names["in.wild.example"] = [["10.0.0.1"]]
        errors = []
        for host in ("in.wild.example", "no.wild.example"):
            with pytest.raises(BadRequest) as caught:
                await rig.fetch(f"http://{host}/")
            errors.append(str(caught.value).removeprefix(host))
        assert errors[0] == errors[1]


async def test_no_descriptor_left_is_not_the_clients_fault(autojump_clock: MockClock) -> None:
    async with running() as rig:
        rig.network.error = OSError(24, "Too many open files")
        with pytest.raises(Overloaded):
            await rig.fetch("http://a.example/")


async def test_leaving_closes_the_connection_at_once(autojump_clock: MockClock) -> None:
    ended: list[float] = []

    async def serve(stream: Stream) -> None:
        await request_of(stream)
        await stream.send_all(HEAD + b"\r\nabc")
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await trio.sleep(0.5)
                await stream.send_all(b"x")
        ended.append(trio.current_time())

    async with running() as rig:
        rig.network.servers["8.8.8.8", 80] = serve
        with trio.move_on_after(2.0):
            await rig.fetch("http://a.example/")
        await trio.sleep(1)
        assert ended == [pytest.approx(2.0, abs=0.5)]


# TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def server_tls(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a context of a server named a.example, and one of a client that trusts it."""
    made, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.make(made, key, names="subjectAltName=DNS:a.example,IP:8.8.8.8")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(made, key)
    return server, ssl.create_default_context(cafile=str(made))


def encrypted(context: ssl.SSLContext, serve: Serve, names: list[str] | None = None) -> Serve:
    async def serve_tls(stream: Stream) -> None:
        tls = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        try:
            await tls.do_handshake()
        except trio.BrokenResourceError:
            return
        await serve(tls)  # type: ignore[arg-type]

    if names is not None:
        context.sni_callback = lambda _, name, __: names.append(name)
    return serve_tls


async def test_https_names_and_verifies_the_host_although_an_address_is_dialed(
    server_tls: tuple[ssl.SSLContext, ssl.SSLContext], autojump_clock: MockClock
) -> None:
    server, client = server_tls
    names: list[str] = []
    async with running(tls=client) as rig:
        rig.network.servers["8.8.8.8", 443] = encrypted(server, answering(ok()), names)
        assert await rig.fetch("https://a.example/") == BODY
        assert await rig.fetch("https://8.8.8.8/") == BODY
        assert names[0] == "a.example"


async def test_a_certificate_of_another_name_or_of_nobody_is_refused(
    server_tls: tuple[ssl.SSLContext, ssl.SSLContext], autojump_clock: MockClock
) -> None:
    server, client = server_tls
    async with running(tls=client) as rig:
        rig.network.servers["9.9.9.9", 443] = encrypted(server, answering(ok()))
        with pytest.raises(BadRequest, match=r"certificate of b\.example cannot be verified"):
            await rig.fetch("https://b.example/")
    async with running() as rig:
        rig.network.servers["8.8.8.8", 443] = encrypted(server, answering(ok()))
        with pytest.raises(BadRequest, match=r"certificate of a\.example cannot be verified"):
            await rig.fetch("https://a.example/")


async def test_https_never_becomes_http(
    server_tls: tuple[ssl.SSLContext, ssl.SSLContext], autojump_clock: MockClock
) -> None:
    server, client = server_tls
    async with running(tls=client) as rig:
        rig.network.servers["8.8.8.8", 443] = encrypted(server, answering(redirect("http://a.example/")))
        with pytest.raises(BadRequest, match="from https to http"):
            await rig.fetch("https://a.example/")


# Data URLs ------------------------------------------------------------------------------------


async def test_a_data_url_is_kept_as_its_text(autojump_clock: MockClock) -> None:
    url = "data:image/png;base64," + "A" * 12_000
    async with running() as rig:
        source = rig.fetcher.source(url)
        assert (source.is_remote, source.bytes_max) == (False, 2 * len(url))
        content = await rig.fetcher.fetch(url, Allowance(rig.fetcher.rules.bytes_max, "alice"))
        assert content.is_data_url
        assert read(content) == url.encode()
        content.close()
        assert rig.network.dialed == []


async def test_files_are_refused_unless_there_is_a_folder_for_them(autojump_clock: MockClock) -> None:
    async with running() as rig:
        with pytest.raises(BadRequest, match="reads no files"):
            await rig.fetch("file:///etc/passwd")
        with pytest.raises(Unsupported, match="must begin"):
            await rig.fetch("s3://bucket/x")
