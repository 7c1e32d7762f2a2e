"""Memory of decoded media is mapped, dropped in pieces and freed by a thread; nothing of it is left."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from actors.engines.shared_tensors import open_tensors, passed_on
from protocol.errors import DeadlineExceeded
from protocol.tensors import Dtype, Tensor
from supervisor.media.contents import SEALS, content_writer, sealed_size
from supervisor.media.memory import COPIED_BYTES_MAX, MediaMemory
from tests.rig.media import open_descriptors

pytestmark = pytest.mark.realtime

LARGE = 24 * 1024 * 1024 + 5


def sealed(size: int) -> int:
    with content_writer() as writer:
        for begin in range(0, size, 1 << 20):
            writer.write(b"\x07" * min(1 << 20, size - begin))
        content = writer.finish()
    descriptor, content.descriptor = content.descriptor, -1
    return descriptor


def shared_kb() -> int:
    """Return the shared memory of this process that is in its page tables."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0])


async def settled(before: int) -> None:
    with trio.fail_after(60):
        while open_descriptors() > before:  # noqa: ASYNC110  # a thread closes the last
            await trio.sleep(0.01)


async def test_a_small_tensor_is_copied() -> None:
    before = open_descriptors()
    view = MediaMemory().take(sealed(COPIED_BYTES_MAX), COPIED_BYTES_MAX)
    assert bytes(view[:2]) == b"\x07\x07"
    assert view.nbytes == COPIED_BYTES_MAX
    assert open_descriptors() == before


async def test_the_pages_of_a_lease_that_has_ended_are_dropped_and_its_file_is_closed_in_a_thread(
    nursery: trio.Nursery,
) -> None:
    memory, before, shared = MediaMemory(), open_descriptors(), shared_kb()
    nursery.start_soon(memory.run)
    tensor = Tensor(Dtype.UINT8, (LARGE,), memory.take(sealed(LARGE), LARGE))
    assert isinstance(tensor.data.obj, mmap.mmap)
    assert sum(tensor.data[:: mmap.PAGESIZE]) > 0
    assert shared_kb() - shared > 20_000
    memory.release(tensor)
    with trio.fail_after(60):
        while shared_kb() - shared > 1_000:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert tensor.data[LARGE - 1] == 7  # whoever still reads it can
    del tensor
    gc.collect()
    await settled(before)


async def test_a_lease_that_ends_while_a_file_is_being_closed_is_not_forgotten(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, before, close = MediaMemory(), open_descriptors(), os.close
    tensor = Tensor(Dtype.UINT8, (LARGE,), memory.take(sealed(LARGE), LARGE))
    began, go_on = trio.Event(), threading.Event()

    def close_slowly(descriptor: int) -> None:
        trio.from_thread.run_sync(began.set)
        go_on.wait(10)
        close(descriptor)

    monkeypatch.setattr(os, "close", close_slowly)
    nursery.start_soon(memory.run)
    memory.close_later(os.dup(0))
    await began.wait()
    memory.release(tensor)
    del tensor
    await trio.testing.wait_all_tasks_blocked()  # it was woken, and had no time for that
    monkeypatch.undo()
    go_on.set()
    await settled(before)


@pytest.mark.parametrize("size", [COPIED_BYTES_MAX + 1, LARGE])
async def test_an_engine_may_open_what_was_mapped_so_that_it_is_not_copied(size: int, nursery: trio.Nursery) -> None:
    memory, before = MediaMemory(), open_descriptors()
    nursery.start_soon(memory.run)
    tensor = Tensor(Dtype.UINT8, (size,), memory.take(sealed(size), size))
    described = passed_on(tensor)
    assert described is not None
    (opened,), (mapping,) = open_tensors([described])
    os.close(mapping.descriptor)
    assert opened.data == tensor.data
    del opened, mapping, tensor
    gc.collect()
    await settled(before)
    with pytest.raises(DeadlineExceeded):
        open_tensors([described])


async def test_what_is_still_mapped_when_the_node_ends_is_freed_with_its_last_view() -> None:
    memory, before = MediaMemory(), open_descriptors()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        view = memory.take(sealed(LARGE), LARGE)
        memory.close_later(os.dup(0))
        nursery.cancel_scope.cancel()
    del view
    async with trio.open_nursery() as nursery:  # the next life closes what was left
        nursery.start_soon(memory.run)
        await settled(before)
        nursery.cancel_scope.cancel()


async def test_a_descriptor_may_be_given_back_in_any_thread(nursery: trio.Nursery) -> None:
    memory, before = MediaMemory(), open_descriptors()
    nursery.start_soon(memory.run)
    for _ in range(20):
        await trio.to_thread.run_sync(memory.close_later, os.dup(0))
    await settled(before + 2)  # of the thread's own


def test_only_files_that_nobody_can_change_have_a_size() -> None:
    descriptor = sealed(5)
    assert sealed_size(descriptor) == 5
    os.close(descriptor)
    for unsealed in (os.memfd_create("x"), os.open("/dev/zero", os.O_RDONLY), os.open("/etc/passwd", os.O_RDONLY)):
        assert sealed_size(unsealed) is None
        os.close(unsealed)


@pytest.mark.parametrize(("name", "size"), [(b"decoded", 0), (b"d\xe9cod\xe9", None), ("é".encode(), None)])
def test_only_a_file_whose_name_can_stand_in_a_message_has_a_size(name: bytes, size: int | None) -> None:
    descriptor = os.memfd_create(os.fsdecode(name), os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    assert sealed_size(descriptor) == size
    os.close(descriptor)
