"""Shared memory between real processes: whoever is killed, stops or never comes, it is freed."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from actors.engines.shared_tensors import open_tensors
from protocol.errors import DeadlineExceeded, EngineLost
from protocol.messages.engine import EngineLoad, GetLoad
from protocol.messages.media import Encode, Encoded
from protocol.tensors import Dtype, SharedRegion, Tensor
from supervisor.tensors.shared_memory import SharedStatistics
from tests.rig.tensor_process import DIES, WAITS, HostProcess, encoded, host_process, sharing_process
from tests.rig.tensors import pixels

pytestmark = pytest.mark.realtime

MB = 1024 * 1024
LARGE = 48 * MB  # of pixels: enough to see it in the memory of the machine, beside whatever else runs there
MESSAGES = 2000
NOTHING = EngineLoad(0, 0, 0)


def memory_files(pid: int) -> list[str]:
    """Return the files in memory that a process has open or mapped."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    found += Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [each for each in found if "/memfd:" in each]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert memory_files(os.getpid()) == []


async def ask(host: HostProcess, size: int, request_id: str = "a", seed: int = 0) -> Encoded:
    item = pixels(size // 3 * 3, seed=seed)
    async with host.link.ask(Encode(request_id, item), 0) as answer:
        result = await answer.result()
    assert isinstance(result, Encoded)
    assert result == encoded(item)
    return result


async def load(host: HostProcess) -> EngineLoad:
    async with host.link.ask(GetLoad(), 0) as answer:
        result = await answer.result()
    assert isinstance(result, EngineLoad)
    return result


async def at_rest(host: HostProcess) -> None:
    """Wait until neither process holds anything, which takes no longer than a few turns."""
    with trio.fail_after(60):
        while True:
            gc.collect()
            if await load(host) == NOTHING and host.memory.statistics() == SharedStatistics():
                break
            await trio.sleep(0.01)
    assert memory_files(host.process.pid) == []


async def test_two_thousand_messages_leave_no_descriptor_and_no_byte_in_either_process() -> None:
    async with host_process() as host:
        await ask(host, MB)
        await at_rest(host)
        before = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), host.process.pid)]
        limiter = trio.CapacityLimiter(16)

        async def one(number: int) -> None:
            async with limiter:
                with trio.move_on_after(0.001 if number % 7 == 0 else 60):  # some leave in the middle
                    await ask(host, 65536 + 300 * (number % 500), seed=number)

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for number in range(MESSAGES):
                    nursery.start_soon(one, number)
        await at_rest(host)
        assert [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), host.process.pid)] == before
        assert host.link.traffic.bytes_sent < MESSAGES * 1000


async def test_what_an_engine_has_shared_outlives_it_as_long_as_somebody_has_it() -> None:
    async with host_process() as host:
        result = await ask(host, LARGE)
        host.process.kill()
        await host.link.wait_lost()
        host.process.wait()
        assert result == encoded(pixels(LARGE))
        assert host.memory.statistics().mapped_bytes == LARGE
        del result
        with trio.fail_after(60):  # the tasks of the link, which has just been lost, still end
            while host.memory.statistics() != SharedStatistics():
                gc.collect()
                await trio.sleep(0.01)


async def test_an_engine_that_is_killed_in_the_middle_leaves_nothing() -> None:
    async with host_process() as host:
        with pytest.raises(EngineLost):
            await ask(host, LARGE, DIES)
        with trio.fail_after(60):
            while host.memory.statistics() != SharedStatistics():  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_an_engine_that_stands_still_costs_the_lease_and_fails_that_call_alone() -> None:
    async with host_process(lease_s=0.5) as host:
        await ask(host, MB)
        os.kill(host.process.pid, signal.SIGSTOP)
        _, answer = host.link.open(Encode("a", pixels(LARGE)), 0)
        with trio.fail_after(60):
            while not host.memory.statistics().regions:  # noqa: ASYNC110
                await trio.sleep(0.01)
            while host.memory.statistics().regions:  # noqa: ASYNC110
                await trio.sleep(0.01)
            while memory_files(os.getpid()):  # noqa: ASYNC110  # a thread closes them
                await trio.sleep(0.01)
        assert not answer.over.is_set()  # the memory is free all the same
        os.kill(host.process.pid, signal.SIGCONT)
        with trio.fail_after(60):
            await answer.over.wait()
        assert isinstance(answer.failure, DeadlineExceeded)
        await ask(host, MB)
        await at_rest(host)


async def test_an_asker_that_leaves_frees_the_memory_of_both() -> None:
    async with host_process() as host:
        with trio.move_on_after(0.3):
            await ask(host, LARGE, WAITS)
        await at_rest(host)


async def test_the_region_of_a_process_that_was_killed_is_not_there_any_more() -> None:
    with sharing_process() as (process, descriptor, name, inode):
        place = SharedRegion(process.pid, descriptor, name, inode, 0, 100)
        tensor = Tensor(Dtype.UINT8, (100,), memoryview(b""), place)
        (opened,), (mapping,) = open_tensors([tensor])
        os.close(mapping.descriptor)
        process.kill()
        process.wait()
        assert bytes(opened.data) == bytes(range(100))
        with pytest.raises(DeadlineExceeded, match="not there any more"):
            open_tensors([tensor])
        del opened, mapping
