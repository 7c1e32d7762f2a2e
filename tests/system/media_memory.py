"""Images through real decoders: the node's memory before and after, and what is left of them.

`python -m tests.system.media_memory [--images 2000]` prints the figures; a test keeps a smaller number of images flat.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from functools import partial
from pathlib import Path

import trio
from attrs import frozen

from actors.kit.calls import Address, mailbox
from actors.media import MediaPorts, PreparationLimits, Preparations, media
from protocol.media import MediaPrepared, PrepareMedia
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


@frozen
class Growth:
    """What a number of images have left behind, and the time that each took."""

    images: int
    resident_kb: int
    descriptors: int
    held_bytes: int
    same_processes: bool
    image_ms: float


async def growth(images: int, folder: Path) -> Growth:
    """Prepare images, two a request, and return what is left of them."""
    contents = [samples.noise(520, 400), samples.noise(640, 300), samples.png(1200, 900), samples.webp()]
    urls = [samples.data_url(content) for content in contents]
    async with decoders(folder) as found, trio.open_nursery() as actor:
        rules = FetchRules(hosts=(), networks=(), bytes_max=4 * MIB, redirects_max=0, fetch_s=5.0, agent="test")
        files = MediaFiles(None, 4 * MIB, 5.0)
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
        began_at = time.perf_counter()
        await play(images)
        found_growth = Growth(
            images,
            resident_kb() - resident,
            open_descriptors() - descriptors,
            preparations.statistics().prepared_bytes.taken,
            processes() == template,
            (time.perf_counter() - began_at) / images * 1000,
        )
        actor.cancel_scope.cancel()
    return found_growth


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2_000)
    with tempfile.TemporaryDirectory() as folder:
        print(trio.run(partial(growth, parser.parse_args().images, Path(folder))))  # noqa: T201


if __name__ == "__main__":
    main()
