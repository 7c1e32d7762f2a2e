"""The thread of the transfer engine: what a read needs, it has, or the reason is an error."""

from __future__ import annotations

import mmap
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from protocol.byte_budget import ByteBudget
from protocol.errors import DeadlineExceeded, LinkLost, Overloaded, RequestError, StartFailed
from protocol.tensors import STAMP_BYTES
from supervisor.tensors.transfer_agent import NoTransfers, TransferAgent, TransferFailed
from supervisor.tensors.transfer_thread import Read, TransferThread
from tests.supervisor.tensors.test_transfer_road import needs_nixl

WITHIN_S = 5.0


class Broken:
    """An agent of a library that fails at every call but those that begin a transfer."""

    description = b"broken"

    def register(self, _: object) -> object:
        return object()

    def begin(self, *_: object) -> object:
        return object()

    def is_over(self, _: object) -> bool:
        return True

    def _fail(self, *_: object) -> None:
        raise TransferFailed("the library fails")

    progress = release = deregister = _fail


def missing() -> TransferAgent:
    raise NoTransfers("needs the package nixl-cu12")


async def test_a_start_without_the_package_fails_with_the_reason() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(StartFailed, match="needs the package nixl-cu12"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(TransferThread(missing, mmap.mmap(-1, 4096)).run)


async def test_more_than_may_ever_be_read_is_refused(autojump_clock: MockClock) -> None:
    transfers = TransferThread(missing, mmap.mmap(-1, 4096), bytes_max=100)
    with pytest.raises(Overloaded, match="100 are read at once"):
        await transfers.read("there", [(4096, 101)], [bytes(16)])
    transfers._budget.share(100, lambda: None)  # noqa: SLF001  # a read that never ends
    with pytest.raises(Overloaded, match="no room"):
        await transfers.read("there", [(4096, 1)], [bytes(16)])


@pytest.mark.parametrize(
    ("stamp", "error"), [(b"s" * STAMP_BYTES, None), (bytes(STAMP_BYTES), DeadlineExceeded)], ids=["equal", "another"]
)
def test_bytes_behind_another_stamp_are_those_of_another_message(
    stamp: bytes, error: type[RequestError] | None
) -> None:
    share = ByteBudget(8).share(8, lambda: None)
    read = Read("there", [(4096, 8)], [b"s" * STAMP_BYTES], share, lambda _: None)
    read.buffer[-STAMP_BYTES:] = stamp
    read.end(cast("TransferAgent", Broken()), None)
    assert type(read.error) is (error or type(None))


@needs_nixl
@pytest.mark.realtime
async def test_an_unknown_agent_cannot_be_read_and_holds_nothing() -> None:
    transfers = TransferThread(lambda: TransferAgent("here"), mmap.mmap(-1, 4096))
    async with trio.open_nursery() as nursery:
        await nursery.start(transfers.run)
        with pytest.raises(LinkLost, match="could not be read"):
            await transfers.read("there", [(4096, 1)], [bytes(16)])
        assert transfers.reading_bytes == 0
        nursery.cancel_scope.cancel()


@pytest.mark.realtime
async def test_a_library_that_fails_ends_the_reads_that_it_concerns_and_not_the_thread() -> None:
    transfers = TransferThread(lambda: cast("TransferAgent", Broken()), mmap.mmap(-1, 4096))
    async with trio.open_nursery() as nursery:
        await nursery.start(transfers.run)
        for _ in range(2):
            with trio.fail_after(WITHIN_S), pytest.raises(LinkLost, match="the library fails"):
                await transfers.read("there", [(4096, 1)], [bytes(16)])
            assert transfers.reading_bytes == 0
        nursery.cancel_scope.cancel()
