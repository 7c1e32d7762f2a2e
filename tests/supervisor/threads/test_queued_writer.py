"""A writer's thread does for an item only what that item needs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from supervisor.threads.queued_writer import QueuedWriter, lost_lines


def test_a_notice_is_made_only_in_place_of_dropped_items() -> None:
    written, notices, threads = list[bytes](), list[tuple[int, int]](), list[Callable[[], None]]()

    def notice(items: int, size: int) -> bytes:
        notices.append((items, size))
        return lost_lines(items, size)

    writer = QueuedWriter(written.append, items_max=2, notice=notice, start=threads.append)
    assert [writer.put(data) for data in (b"a\n", b"b\n", b"c\n")] == [True, True, False]
    Thread(target=threads[0], daemon=True).start()
    assert writer.flush(5.0)
    assert writer.put(b"d\n")
    assert writer.flush(5.0)
    assert b"".join(written) == b"a\nb\n1 log line was lost\nd\n"
    assert notices == [(1, 2)]
