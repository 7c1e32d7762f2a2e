"""SGLang's own metrics in the host: read in a thread, once for all who ask, whole families up to a limit."""

from __future__ import annotations

import asyncio
import threading

import pytest

from actors.engines.sglang.host.metrics import MetricsReader, bounded
from protocol.errors import NotReady
from protocol.link.frames import FRAME_BYTES_MAX
from protocol.messages.operations import METRICS_BYTES_MAX, EngineMetrics

FAMILY = "# HELP sglang:x About\n# TYPE sglang:x gauge\nsglang:x 1.0\nsglang:x 2.0\n"


def test_families_are_whole_and_what_finds_no_room_is_counted() -> None:
    size = len(FAMILY)
    assert bounded([FAMILY, FAMILY], 2 * size) == EngineMetrics(2 * FAMILY)
    assert bounded([FAMILY, FAMILY + "sglang:x 3.0\n", FAMILY], 2 * size) == EngineMetrics(2 * FAMILY, 3)
    assert bounded(["é\n"], 2) == EngineMetrics("", 1), "bytes, not characters"
    assert METRICS_BYTES_MAX < FRAME_BYTES_MAX / 2


def test_metrics_are_read_in_a_thread_once_for_all_who_ask_meanwhile() -> None:
    reads, may_end = list[int](), threading.Event()

    def read() -> EngineMetrics:
        reads.append(threading.get_ident())
        may_end.wait(10)
        return EngineMetrics(f"{len(reads)}")

    async def main() -> None:
        reader = MetricsReader(read)
        waiting = [asyncio.create_task(reader.metrics()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # one asker leaves, and the others get theirs
        may_end.set()
        assert [await task for task in waiting[1:]] == [EngineMetrics("1")] * 2
        assert await reader.metrics() == EngineMetrics("2"), "later ones are read anew"

    asyncio.run(main())
    assert threading.get_ident() not in reads


def test_metrics_that_cannot_be_read_are_no_failure_of_the_engine() -> None:
    """An `InternalError` would count, and end the host."""

    def read() -> EngineMetrics:
        raise FileNotFoundError("gauge_live_1.db")

    with pytest.raises(NotReady, match="its metrics cannot be read: FileNotFoundError"):
        asyncio.run(MetricsReader(read).metrics())
