"""The memory that a node shares: counted, limited, and closed where it delays nobody."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.engines.shared_tensors import open_tensors
from protocol.errors import Overloaded
from protocol.tensors import Dtype, Tensor
from supervisor.tensors.shared_memory import CLOSED_AT_ONCE_BYTES, DESCRIPTOR_BYTES, SharedMemory, SharedStatistics
from tests.rig.tensors import bytes_of


def tensor(size: int) -> Tensor:
    return Tensor(Dtype.UINT8, (size,), bytes_of(size))


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").is_symlink()


async def mapped(memory: SharedMemory, size: int) -> tuple[list[Tensor], int]:
    """Return tensors of `size` bytes in a mapping that the memory keeps, and its descriptor."""
    async with memory.copied([tensor(size)]) as copied:
        tensors, (mapping,) = open_tensors(copied.tensors)
        memory.keep(mapping)
        return tensors, mapping.descriptor


async def test_a_region_counts_until_the_end_and_is_open_until_it_is_closed(autojump_clock: MockClock) -> None:
    memory = SharedMemory()
    async with memory.copied([tensor(100), tensor(300)]) as copied:
        assert memory.statistics() == SharedStatistics(regions=1, region_bytes=428, taken_bytes=DESCRIPTOR_BYTES)
        descriptor = copied.region.descriptor
        copied.close()
        copied.close()
        assert not is_open(descriptor)
        assert memory.statistics() == SharedStatistics(taken_bytes=DESCRIPTOR_BYTES)
    assert memory.statistics() == SharedStatistics()


async def test_a_mapping_counts_as_long_as_anything_refers_to_its_bytes(autojump_clock: MockClock) -> None:
    memory = SharedMemory()
    tensors, descriptor = await mapped(memory, 5000)
    view = tensors.pop().data[7:9]
    assert memory.statistics() == SharedStatistics(mappings=1, mapped_bytes=5000)
    assert is_open(descriptor)
    assert bytes(view) == bytes(bytes_of(9))[7:]
    del view
    assert memory.statistics() == SharedStatistics()
    assert not is_open(descriptor)


async def test_whoever_cannot_be_given_memory_leaves_nothing(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SharedMemory()

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    for name in ("write", "memfd_create"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(Overloaded):
                async with memory.copied([tensor(100)]):
                    pass
        assert memory.statistics() == SharedStatistics()


async def test_a_task_that_is_cancelled_while_it_copies_leaves_nothing(autojump_clock: MockClock) -> None:
    memory = SharedMemory()
    with trio.CancelScope() as scope:

        async def cancel() -> None:
            while not memory.statistics().regions:
                await trio.lowlevel.checkpoint()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            async with memory.copied([tensor(50 * DESCRIPTOR_BYTES)]):
                pytest.fail("it was copied in spite of that")
    assert scope.cancelled_caught
    assert memory.statistics() == SharedStatistics()


async def test_many_small_regions_are_limited_in_number(autojump_clock: MockClock) -> None:
    memory = SharedMemory(3 * DESCRIPTOR_BYTES)
    most = 0

    async def hold() -> None:
        nonlocal most
        async with memory.copied([tensor(1)]):
            most = max(most, memory.statistics().regions)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for _ in range(9):
            nursery.start_soon(hold)
        await wait_all_tasks_blocked()
        assert memory.statistics().waiting == 6
    assert (most, trio.current_time()) == (3, 3)
    assert not memory.can_hold([tensor(3 * DESCRIPTOR_BYTES + 1)])
    assert memory.can_hold([tensor(3 * DESCRIPTOR_BYTES)])


# Closing ------------------------------------------------------------------------------------


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return the descriptors that are closed, each with whether that was in the thread of the event loop."""
    found: list[tuple[int, bool]] = []
    close = os.close

    def record(descriptor: int) -> None:
        found.append((descriptor, threading.current_thread() is threading.main_thread()))
        close(descriptor)

    monkeypatch.setattr(os, "close", record)
    return found


async def settled(closed: list[Any], number: int) -> None:
    with trio.fail_after(60):
        while len(closed) < number:  # noqa: ASYNC110  # a thread does it
            await trio.sleep(0.01)


@pytest.mark.realtime
async def test_much_memory_is_freed_in_a_thread_and_little_at_once(closed: list[tuple[int, bool]]) -> None:
    memory = SharedMemory()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        nursery.start_soon(memory.run)
        await wait_all_tasks_blocked()
        for size, in_loop in ((CLOSED_AT_ONCE_BYTES, True), (CLOSED_AT_ONCE_BYTES + 1, False)):
            closed.clear()
            tensors, descriptor = await mapped(memory, size)
            await settled(closed, 1)
            assert [where for _, where in closed] == [in_loop]
            await trio.to_thread.run_sync(tensors.clear)  # the last reference may go in any thread
            await settled(closed, 2)
            assert not is_open(descriptor)
            assert memory.statistics() == SharedStatistics()
        nursery.cancel_scope.cancel()


async def test_what_is_left_at_the_end_is_closed_then_and_later_at_once(closed: list[tuple[int, bool]]) -> None:
    memory = SharedMemory()
    tensors, _ = await mapped(memory, CLOSED_AT_ONCE_BYTES + 1)
    closed.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        tensors.clear()
        assert closed == []
    assert [where for _, where in closed] == [True]
    tensors, _ = await mapped(memory, CLOSED_AT_ONCE_BYTES + 1)
    tensors.clear()
    assert len(closed) == 3
    assert memory.statistics() == SharedStatistics()
