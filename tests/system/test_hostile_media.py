"""The table of hostile media: each is refused with its code, in its time, and leaves nothing behind.

A real media actor with real decoders fetches over real sockets. Hosts are scripted servers on loopback, which the
operator of these tests allows at one address; every other address of this machine stays forbidden.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import Factory, define, evolve, field

from actors.kit.calls import Address, mailbox
from actors.media.media import MediaPorts, PreparationLimits, Preparations, media
from protocol.errors import BadRequest, RequestError, TooLarge, Unsupported
from protocol.messages.media import Media, MediaItem, MediaPrepared, Modality, PrepareMedia
from supervisor.config.media import parse_host
from supervisor.media import addresses
from supervisor.media.decoding import Decoders
from supervisor.media.fetching import Fetcher, FetchRules
from supervisor.media.files import MediaFiles
from supervisor.media.network import SystemNetwork
from tests.rig import certificate
from tests.rig import media_samples as samples
from tests.rig.media import decoders, limited, open_descriptors
from tests.rig.vision import LAYOUT
from tests.supervisor.media.test_decoding import processes

pytestmark = pytest.mark.realtime

MIB = 1024 * 1024
BYTES_MAX = 4 * MIB
SERVER = "127.0.0.77"  # the only address that is allowed
HOSTS = ("media.test", "changing.test", "private.test", "localhost", "127.0.0.1", "127.0.0.77", "nowhere.test")
FETCH_S, ENDS_WITHIN_S = 3.0, 12.0
LIMITS = PreparationLimits(
    items_max=4,
    tokens_max=2_000,
    prepare_s=20.0,
    fetched_bytes_max=64 * MIB,
    prepared_bytes_max=64 * MIB,
    fetches_max=8,
    decodes_max=2,
    waiting_max=16,
)


@define(eq=False)
class Names(SystemNetwork):
    """The network of this machine, with names of its own; every second look-up of `changing.test` is another address."""

    asked: list[str] = Factory(list)

    async def resolve(self, host: str, port: int, *, owner: str, within_s: float) -> Sequence[addresses.IpAddress]:
        self.asked.append(host)
        await trio.lowlevel.checkpoint()
        if host == "changing.test":
            return [ip_address(SERVER if self.asked.count(host) % 2 else "127.0.0.1")]
        if host in {"media.test", "private.test"}:
            return [ip_address(SERVER if host == "media.test" else "10.1.2.3")]
        return await super().resolve(host, port, owner=owner, within_s=within_s)


Handler = Callable[[trio.SocketStream], Awaitable[None]]


@define(eq=False)
class HostileRig:
    """A media actor, the port of the scripted servers and what was asked of the forbidden one."""

    address: Address[PrepareMedia, MediaPrepared, None]
    decoders: Decoders
    network: Names
    root: Path
    ports: dict[str, int]
    paths: dict[str, Handler] = field(factory=dict)
    reached: list[str] = field(factory=list)  # the forbidden server was connected to

    async def prepared(self, url: str, modality: Modality = Modality.IMAGE) -> MediaItem:
        filled = url.format(http=self.ports["http"], https=self.ports["https"], root=self.root)
        items = (Media(modality, filled, param="image_url"),)
        async with self.address.ask(PrepareMedia("1", "seeing", items), 1) as answer:
            async for reply in answer:
                return reply.items[0]
        raise AssertionError("an answer without a reply")


def http(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def sends(data: bytes, stream: trio.abc.Stream) -> None:
    await stream.send_all(data)


async def endless(stream: trio.abc.Stream) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + samples.png())
    while True:
        await stream.send_all(bytes(64 * 1024))


async def slow(stream: trio.abc.Stream) -> None:
    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for byte in samples.png():
        await stream.send_all(bytes([byte]))
        await trio.sleep(0.5)


async def silent(_: trio.abc.Stream) -> None:
    await trio.sleep_forever()


async def redirects(location: str, stream: trio.abc.Stream) -> None:
    await stream.send_all(http(b"", f"Location: {location}", status="302 Found"))


PATHS: dict[str, Any] = {
    "/good.png": partial(sends, http(samples.png())),
    "/endless": endless,
    "/slow": slow,
    "/silent": silent,
    "/stated": partial(sends, http(b"", length=1 << 40)),
    "/text": partial(sends, http(b"<html>no image</html>", "Content-Type: image/png")),
    "/cut": partial(sends, http(samples.png(), length=100_000)),
    "/gzip": partial(sends, http(samples.png(), "Content-Encoding: gzip")),
    "/loop": partial(redirects, "/loop"),
    "/to-loopback": partial(redirects, "http://127.0.0.1:{forbidden}/secret"),
    "/to-localhost": partial(redirects, "http://localhost:{forbidden}/secret"),
    "/to-metadata": partial(redirects, "http://169.254.169.254/latest/meta-data/"),
    "/to-file": partial(redirects, "file:///etc/passwd"),
    "/to-itself": partial(redirects, "http://changing.test:{http}/secret"),
    "/to-good": partial(redirects, "/good.png"),
    "/missing": partial(sends, http(b"", status="404 Not Found")),
}


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[HostileRig]:
    made, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.make(made, key, names="subjectAltName=DNS:media.test")
    root = _files(tmp_path)
    before = open_descriptors()
    async with (
        decoders(tmp_path, evolve(limited(decode_s=2.0), bytes_max=BYTES_MAX)) as found,
        trio.open_nursery() as own,
    ):
        network = Names()
        address: Address[PrepareMedia, MediaPrepared, None]
        address, inbox = mailbox(4)
        rig = HostileRig(address, found, network, root, {})
        await _serve(rig, own, made, key)
        patterns = [parse_host(f"{host}:{port}") for host in HOSTS for port in rig.ports.values()]
        rules = FetchRules(
            hosts=[pattern for pattern in patterns if pattern is not None],
            networks=[ip_network(f"{SERVER}/32")],
            bytes_max=BYTES_MAX,
            redirects_max=3,
            fetch_s=FETCH_S,
            agent="espalier/test",
        )
        tls = ssl.create_default_context(cafile=str(made))
        fetcher = Fetcher(rules, network, MediaFiles(root, FETCH_S), tls, found.memory.close_later)
        ports = MediaPorts(fetcher.source, fetcher.fetch, found.inspect, found.decode, found.memory.release)
        preparations = Preparations({"seeing": LAYOUT}, ports, LIMITS, lambda *_: None)
        await own.start(media, inbox, preparations)
        yield rig
        await trio.testing.wait_all_tasks_blocked(0.05)
        budgets = preparations.statistics()
        assert {budget.taken for budget in (budgets.fetched_bytes, budgets.prepared_bytes, budgets.decodes)} == {0}
        own.cancel_scope.cancel()
    assert processes() == []
    assert open_descriptors() <= before + 2  # of threads that are kept


async def _serve(rig: HostileRig, nursery: trio.Nursery, made: Path, key: Path) -> None:
    """Start the servers: the allowed one with and without TLS, and one at the address that nobody may ask."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made, key)

    async def forbidden(stream: trio.SocketStream) -> None:
        async with stream:
            rig.reached.append("forbidden")
            await stream.send_all(http(samples.png()))

    async def allowed(stream: trio.abc.Stream) -> None:
        async with stream:
            if not (head := bytes(await stream.receive_some(4096))):
                return  # it did not trust the certificate
            handler = PATHS[head.split(b" ")[1].decode()]
            if isinstance(handler, partial) and handler.func is redirects:
                handler = partial(redirects, handler.args[0].format(**rig.ports))
            with trio.move_on_after(ENDS_WITHIN_S):
                with suppress(trio.BrokenResourceError):
                    await handler(stream)

    async def encrypted(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await allowed(trio.SSLStream(stream, context, server_side=True, https_compatible=True))

    for name, host, serve in (
        ("http", SERVER, allowed),
        ("https", SERVER, encrypted),
        ("forbidden", "127.0.0.1", forbidden),
    ):
        listeners = await trio.open_tcp_listeners(0, host=host)
        rig.ports[name] = listeners[0].socket.getsockname()[1]
        nursery.start_soon(partial(trio.serve_listeners, serve, listeners))


def _files(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(samples.png())
    (root / "good.png").write_bytes(samples.png())
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    (root / "device.png").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe.png")
    (root / "large.png").write_bytes(bytes(BYTES_MAX + 1))
    (root / "a.pt").write_bytes(pickle.dumps({}))
    (root / "named.png").write_bytes(pickle.dumps({"embeddings": []}))
    return root


def data(content: bytes) -> str:
    return samples.data_url(content).replace("{", "{{")


def shaped(tokens: int, grid: tuple[int, int, int], width: int = 8) -> str:
    return data(samples.embeddings(tokens, width, grid))


BAD_HEADER = json.dumps({"embeddings": {"dtype": "F32", "shape": [1 << 30, 1 << 30], "data_offsets": [0, 1 << 62]}})
NAN = samples.safetensors(
    {"embeddings": ("F32", (4, 1), struct.pack("<4f", 1, 2, 3, float("nan"))), "grid_thw": ("I64", (3,), struct.pack("<3q", 1, 4, 4))}
)  # fmt: skip
MEDIA, SECURE = "http://media.test:{http}", "https://media.test:{https}"

Hostile = tuple[str, str, type[RequestError], str]  # its name, its URL, the error and its sentence

IMAGES: list[Hostile] = [
    # Where it is
    ("a host that is not allowed", "https://elsewhere.test/x.png", BadRequest, "does not fetch from elsewhere.test"),
    ("a port that is not allowed", "http://media.test:22/x.png", BadRequest, "does not fetch from media.test:22"),
    ("loopback by its address", "http://127.0.0.1:{http}/x", BadRequest, "cannot be reached from this server"),
    ("loopback by its name", "http://localhost:{http}/x", BadRequest, "cannot be reached from this server"),
    ("loopback, written as a number", "http://2130706433:{http}/x", BadRequest, "does not fetch from"),
    ("a private address behind a name", "http://private.test:{http}/x", BadRequest, "cannot be reached"),
    ("a name that does not exist", "http://nowhere.test:{http}/x", BadRequest, "cannot be reached"),
    ("a redirect to loopback", MEDIA + "/to-loopback", BadRequest, "does not fetch from|cannot be reached"),
    ("a redirect to loopback by its name", MEDIA + "/to-localhost", BadRequest, "does not fetch from|cannot be reached"),
    ("a redirect to the metadata service", MEDIA + "/to-metadata", BadRequest, "does not fetch from 169.254.169.254"),
    ("a redirect to a file", MEDIA + "/to-file", BadRequest, "redirects to a file"),
    ("a redirect in a circle", MEDIA + "/loop", BadRequest, "more than 3 redirects"),
    ("a name whose answer changes", "http://changing.test:{http}/to-itself", BadRequest, "cannot be reached"),
    ("https that becomes http", SECURE + "/to-itself", BadRequest, "from https to http"),
    ("a certificate of another name", "https://changing.test:{https}/x", BadRequest, "cannot be verified"),
    ("a user and a password", "http://a:b@media.test:{http}/good.png", BadRequest, "user name"),
    ("another scheme", "gopher://media.test/x", Unsupported, "must begin with"),
    ("no URL", "../../etc/passwd", Unsupported, "must begin with"),
    # Files
    ("a file outside the root", "file:///etc/passwd", BadRequest, "no such file"),
    ("a file above the root", "file://{root}/../secret.png", BadRequest, "no such file"),
    ("a file through a link", "file://{root}/link.png", BadRequest, "no such file"),
    ("a file through a linked folder", "file://{root}/up/secret.png", BadRequest, "no such file"),
    ("a device", "file://{root}/device.png", BadRequest, "no such file"),
    ("a pipe", "file://{root}/pipe.png", BadRequest, "no such file"),
    ("a file that is too large", "file://{root}/large.png", TooLarge, "can have 4,194,304 bytes"),
    ("a pickle by its name", "file://{root}/a.pt", Unsupported, "a pickle can run code"),
    ("a pickle by its bytes", "file://{root}/named.png", Unsupported, "a pickle can run code"),
    # What its server does
    ("an endless body", MEDIA + "/endless", TooLarge, "can have 4,194,304 bytes"),
    ("a stated size", MEDIA + "/stated", TooLarge, "can have 4,194,304 bytes"),
    ("a slow body", MEDIA + "/slow", BadRequest, "not fetched within 3 s"),
    ("no answer", MEDIA + "/silent", BadRequest, "not fetched within 3 s"),
    ("a body that is cut", MEDIA + "/cut", BadRequest, "ended its answer too early"),
    ("a compressed body", MEDIA + "/gzip", BadRequest, "encoded body"),
    ("an error", MEDIA + "/missing", BadRequest, "status 404"),
    # What it is
    ("another type than was claimed", MEDIA + "/text", Unsupported, "HTML"),
    ("no base64", "data:image/png;base64,%%%", BadRequest, "base64 is not valid"),
    ("no content", "data:image/png;base64,", BadRequest, "has no data behind its comma"),
    ("text", data(b"hello"), Unsupported, "of no type that is known here"),
    ("a truncated image", data(samples.png()[:-60]), BadRequest, "truncated or corrupt"),
    ("a truncated header", data(samples.png()[:20]), BadRequest, "header"),
    ("1 GB of pixels in 1 kB", data(samples.png_bomb(40_000, 25_000)), TooLarge, "40000 x 25000 pixels"),
    ("a narrow image", data(samples.png(2_010, 10)), BadRequest, "200 times"),
    ("an animation", data(samples.animated("GIF")), Unsupported, "animated GIF"),
    ("an animated PNG", data(samples.animated("PNG")), Unsupported, "animated PNG"),
    ("a video in place of an image", data(samples.video()), Unsupported, "an image is expected"),
    ("a TIFF", data(samples.saved(samples.picture(), "TIFF")), Unsupported, "TIFF"),
    ("an SVG", data(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), Unsupported, "SVG"),
    ("a playlist that names files", data(b"#EXTM3U\nfile:///etc/passwd\n"), Unsupported, "playlist"),
    ("sound", data(samples.sound()), Unsupported, "an image is expected"),
    ("a pickle", data(pickle.dumps({"embeddings": [1.0]})), Unsupported, "a pickle can run code"),
    # Embeddings
    ("too few embeddings for their grid", shaped(3, (1, 4, 4)), BadRequest, "makes 4 tokens, and there are 3"),
    ("a grid that cannot be", shaped(4, (1, 3, 4)), BadRequest, "divisible by 2"),
    ("a negative grid", shaped(4, (1, -4, -4)), BadRequest, "divisible by 2"),
    ("a grid of a video", shaped(8, (2, 4, 4)), BadRequest, "grid_thw of an image is 1"),
    ("embeddings that are truncated", data(samples.embeddings()[:-1]), BadRequest, "it is truncated"),
    ("embeddings of a shape that overflows", data(len(BAD_HEADER).to_bytes(8, "little") + BAD_HEADER.encode()),
     BadRequest, "not stated as it should be"),
    ("embeddings that are no numbers", data(NAN), BadRequest, "finite"),
]  # fmt: skip


VIDEOS: list[Hostile] = [
    ("a truncated video", data(samples.video()[: len(samples.video()) // 2]), BadRequest, "cannot be read"),
    ("an image in place of a video", data(samples.png()), Unsupported, "a video is expected"),
    ("sound in place of a video", data(samples.sound()), Unsupported, "it has no video"),
    ("a video of one frame", data(samples.video(frames=1)), BadRequest, "at least 2 frames"),
    ("embeddings in place of a video", data(samples.embeddings()), Unsupported, "a safetensors file"),
    ("a long video", data(samples.video(frames=130, fps=2)), TooLarge, "lasts 65.0 s; the limit is 60 s"),
]


TABLES = {Modality.IMAGE: IMAGES, Modality.VIDEO: VIDEOS}


@pytest.mark.parametrize("modality", TABLES)
async def test_hostile_media_is_refused(modality: Modality, tmp_path: Path) -> None:
    wrong: dict[str, str] = {}
    async with running(tmp_path) as rig:
        for name, url, error, reason in TABLES[modality]:
            try:
                with trio.move_on_after(ENDS_WITHIN_S):
                    await rig.prepared(url, modality)
            except RequestError as raised:
                is_right = type(raised) is error and re.search(reason, str(raised)) is not None
                if not is_right or (raised.fault, raised.param) != ("client", "image_url"):
                    wrong[name] = repr(raised)
            else:
                wrong[name] = "it was not refused in time"
        assert rig.reached == []
        assert (rig.decoders.counts.crashes, rig.decoders.counts.malformed) == (0, 0)
    assert wrong == {}


GOOD = [
    MEDIA + "/good.png",
    SECURE + "/good.png",
    SECURE + "/to-good",
    "file://{root}/good.png",
    data(samples.png()),
    data(samples.saved(samples.picture(), "PNG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")),  # a corrupt EXIF
]


async def test_what_is_allowed_is_prepared_over_real_sockets(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for url in GOOD:
            with trio.fail_after(ENDS_WITHIN_S):
                item = await rig.prepared(url)
            assert bytes(item.data.data) == samples.picture().tobytes()
        assert IPv4Address(SERVER).is_loopback
