"""The thread of the transfer engine: what a read needs, it has, or the reason is an error."""

from __future__ import annotations

import mmap

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import LinkLost, Overloaded, StartFailed
from supervisor.tensors.transfer_agent import NoTransfers, TransferAgent
from supervisor.tensors.transfer_thread import TransferThread
from tests.supervisor.tensors.test_transfer_road import needs_nixl


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
