"""Operations of the engines of a cluster: who is asked, and what becomes of each engine."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.dialects.operations import failure
from protocol.errors import InternalError, NotReady, Overloaded, RequestError
from protocol.messages.engine import Done
from protocol.messages.operations import OPERATION_OF, FlushCache
from supervisor.cluster import operations
from supervisor.cluster.directory import Directory
from tests.rig.nodes import unlink
from tests.supervisor.cluster.test_engine_control import OFFER, Engine, front

FLUSH = OPERATION_OF[FlushCache]


async def failure_of_flush(directory: Directory) -> RequestError | None:
    """Flush all caches, and return the error that stands for those of all engines."""
    return failure(FLUSH, await operations.operate(directory, FlushCache()))


# Flushes -------------------------------------------------------------------------------------


async def test_every_engine_of_the_cluster_is_flushed(autojump_clock: MockClock) -> None:
    engines = [Engine(takes_s=1) for _ in range(3)]
    async with front(engines[0], a=engines[1], b=engines[2]) as (directory, _):
        outcomes = await operations.operate(directory, FlushCache())
        assert outcomes == dict.fromkeys(("a/tiny-0", "b/tiny-0", "main/tiny-0"), Done())
        assert ([engine.flushed for engine in engines], trio.current_time()) == ([1, 1, 1], 1)


async def test_the_error_of_a_flush_names_every_engine_with_its_outcome(autojump_clock: MockClock) -> None:
    far = {"a": Engine(), "busy": Engine(busy=True), "gone": Engine(), "slow": Engine(takes_s=60), "starts": None}
    async with front(Engine(), **far) as (directory, transports):
        directory.configure("gone", None, [OFFER])
        transports["gone"].cut()
        await wait_all_tasks_blocked()
        unlink(directory, "gone")
        error = await failure_of_flush(directory)
        assert trio.current_time() == FLUSH.within_s
    assert isinstance(error, Overloaded)
    assert error.detail.split("; ") == [
        "engine busy/tiny-0 was not flushed: requests run",
        "engine gone/tiny-0 was not flushed: there is no link to node gone",
        "engine slow/tiny-0 was not flushed: it did not answer within 5 s",
        "engine starts/tiny-0 was not flushed: it is starting",
        "flushed: a/tiny-0, main/tiny-0",
    ]


async def test_a_flush_that_failed_where_no_engine_is_busy_is_not_ready(autojump_clock: MockClock) -> None:
    async with front(None) as (directory, _):
        error = await failure_of_flush(directory)
        assert isinstance(error, NotReady)
        assert error.detail == "engine main/tiny-0 was not flushed: it is starting"


@pytest.mark.parametrize("broken", ["here", "there"])
async def test_a_bug_in_an_engine_that_is_flushed_is_an_internal_error(broken: str, autojump_clock: MockClock) -> None:
    engines = {name: Engine(broken=name == broken, busy=name != broken) for name in ("here", "there")}
    async with front(engines["here"], there=engines["there"]) as (directory, _):
        error = await failure_of_flush(directory)
        assert isinstance(error, InternalError)
        assert "tiny-0 was not flushed" in error.detail
