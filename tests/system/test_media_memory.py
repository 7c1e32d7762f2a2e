"""The memory of a node stays flat, however many images its real decoders prepare."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import trio

from actors.kit.calls import Address, mailbox
from actors.media.media import MediaPorts, PreparationLimits, Preparations, media
from protocol.messages.media import MediaPrepared, PrepareMedia
from supervisor.media.fetching import Fetcher, FetchRules
from supervisor.media.files import MediaFiles
from supervisor.media.network import SystemNetwork
from supervisor.node.media_child import tls_context
from tests.rig import media_samples as samples
from tests.rig.media import decoders, open_descriptors
from tests.rig.vision import LAYOUT
from tests.supervisor.media.test_decoding import processes

MIB = 1024 * 1024
AT_ONCE = 4
IMAGES = 300  # two a request
WARM_UP = 60  # images, until everything is there that is kept for ever
LIMITS = PreparationLimits(
    items_max=2,
    tokens_max=10_000,
    prepare_s=120.0,
    fetched_bytes_max=64 * MIB,
    prepared_bytes_max=64 * MIB,
    fetches_max=AT_ONCE,
    decodes_max=AT_ONCE,
    waiting_max=AT_ONCE,
)


def resident_kb() -> int:
    """Return the memory of this process, shared files in memory included."""
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


@pytest.mark.realtime
@pytest.mark.nightly
async def test_images_leave_nothing_behind(tmp_path: Path) -> None:
    contents = [samples.noise(520, 400), samples.noise(640, 300), samples.png(1200, 900), samples.webp()]
    urls = [samples.data_url(content) for content in contents]
    async with decoders(tmp_path) as found, trio.open_nursery() as actor:
        rules = FetchRules(hosts=(), networks=(), bytes_max=4 * MIB, redirects_max=0, fetch_s=5.0, agent="test")
        files = MediaFiles(None, 5.0)
        fetcher = Fetcher(rules, SystemNetwork(), files, tls_context(None), found.memory.close_later)
        ports = MediaPorts(fetcher.source, fetcher.fetch, found.inspect, found.decode, found.memory.release)
        preparations = Preparations({"seeing": LAYOUT}, ports, LIMITS, lambda *_: None)
        address: Address[PrepareMedia, MediaPrepared, None]
        address, inbox = mailbox(AT_ONCE)
        await actor.start(media, inbox, preparations)

        async def play(count: int) -> None:
            left = iter(range(count // 2))

            async def client() -> None:
                for number in left:
                    items = tuple(samples.by_url(urls[(number + place) % len(urls)]) for place in range(2))
                    async with address.ask(PrepareMedia(str(number), "seeing", items), 1) as answer:
                        async for prepared in answer:
                            assert all(len(item.data.data[::4096]) for item in prepared.items)  # each page is read
                            break

            async with trio.open_nursery() as clients:
                for _ in range(AT_ONCE):
                    clients.start_soon(client)
            await trio.sleep(0.5)
            gc.collect()

        await play(WARM_UP)
        resident, descriptors, template = resident_kb(), open_descriptors(), processes()
        await play(IMAGES)
        assert resident_kb() - resident < 2_000
        assert open_descriptors() <= descriptors + 1  # of a thread that is kept
        assert preparations.statistics().prepared_bytes.taken == 0
        assert processes() == template
        actor.cancel_scope.cancel()
