"""Tensors between two processes by NIXL: the same bytes, or an error, and nothing is left of them at either end."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import pytest
import trio
from attrs import evolve

from protocol.errors import DeadlineExceeded, LinkLost, PeerViolation
from protocol.link.frames import OfferedMemory
from protocol.messages.media import Encode, Encoded, MediaForm, MediaItem, Modality
from protocol.tensors import STAMP_BYTES, Dtype, MemoryRange, Tensor
from supervisor.tensors.transfer_road import MEMORY_BYTES, TRANSFERRED_BYTES_MIN, TransferMemory, TransferRoad
from tests.rig.tensors import bytes_of, pixels
from tests.rig.transfer_process import BEYOND, DIES, FREES, STAMP, Ends, linked_process
from tests.rig.transfer_process import MEMORY_BYTES as FAR_BYTES

needs_nixl = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")
MIB = 1024 * 1024
SIZE = 12 * 2**18
SHAPES = [  # frames, height, width, and the elements of the result
    (1, 1, 4, Dtype.FLOAT32),
    (1, 128, 170, Dtype.FLOAT32),
    (1, 128, 172, Dtype.BFLOAT16),
    (1, 256, 256, Dtype.FLOAT16),
    (1, 1, 1_048_576, Dtype.FLOAT32),
    (2, 512, 512, Dtype.FLOAT16),
    (8, 333, 444, Dtype.BFLOAT16),
    (1, 1024, 1024, Dtype.BFLOAT16),
    (1, 2000, 1000, Dtype.FLOAT32),
    (4, 1024, 1024, Dtype.FLOAT16),
]


def item(frames: int, height: int, width: int, digest: str = "ab") -> MediaItem:
    size = frames * height * width * 3
    data = Tensor(Dtype.UINT8, (frames, height, width, 3), bytes_of(size, seed=size))
    return MediaItem(Modality.IMAGE, digest * 32, (1, 2, 2), 1, MediaForm.PIXELS, data)


async def encode(ends: Ends, request: Encode) -> Encoded:
    async with ends.link.ask(request, 0) as answer:
        result = await answer.result()
    assert isinstance(result, Encoded)
    return result


def stand(until: threading.Event) -> None:
    until.wait(3)


async def check_nothing_held(ends: Ends) -> None:
    with trio.fail_after(5):
        while ends.memory.free_bytes != ends.memory.size - 128 or await ends.free_bytes() != FAR_BYTES - 128:  # noqa: ASYNC110  # another process
            await trio.sleep(0.01)
    assert ends.memory.transfers.reading_bytes == 0


@needs_nixl
@pytest.mark.realtime
async def test_ten_shapes_and_types_arrive_with_equal_bytes_and_hardly_any_go_over_the_link() -> None:
    async with linked_process() as ends:
        for frames, height, width, dtype in SHAPES:
            asked = item(frames, height, width)
            before = ends.link.traffic.bytes_sent
            result = await encode(ends, Encode(dtype, asked))
            assert (result.item.data.dtype, len(result.item.data.shape)) == (dtype, 2)
            assert result.item.data.data == asked.data.data
            if len(asked.data.data) >= TRANSFERRED_BYTES_MIN:
                assert ends.link.traffic.bytes_sent - before < 2000
        await check_nothing_held(ends)


@needs_nixl
@pytest.mark.realtime
async def test_a_lie_about_a_place_is_an_error_of_the_call_or_ends_the_link() -> None:
    async with linked_process() as ends:
        for lie in (STAMP, FREES):
            with pytest.raises(DeadlineExceeded, match="not there any more"):
                await encode(ends, Encode("a", pixels(SIZE, lie * 32)))
            await check_nothing_held(ends)
        assert (await encode(ends, Encode("a", pixels(SIZE)))).item.data.data == bytes_of(SIZE)
        with pytest.raises(LinkLost):
            await encode(ends, Encode("a", pixels(SIZE, BEYOND * 32)))
        assert isinstance(ends.link.ended, PeerViolation)


@needs_nixl
@pytest.mark.realtime
async def test_the_death_of_the_sender_fails_the_call_and_frees_all() -> None:
    async with linked_process() as ends:
        with trio.fail_after(5), pytest.raises(LinkLost):
            await encode(ends, Encode("a", pixels(SIZE, DIES * 32)))
        with trio.fail_after(5):
            while ends.memory.free_bytes != ends.memory.size - 128 or ends.memory.transfers.reading_bytes:  # noqa: ASYNC110
                await trio.sleep(0.01)


@needs_nixl
@pytest.mark.realtime
async def test_a_reader_that_never_comes_holds_the_memory_for_the_lease_alone() -> None:
    async with linked_process(lease_s=0.3) as ends:
        standing = threading.Event()
        ends.memory.transfers._commands.put(lambda _: stand(standing))  # noqa: SLF001
        failed: list[DeadlineExceeded] = []

        async def ask() -> None:
            try:
                await encode(ends, Encode("a", pixels(SIZE)))
            except DeadlineExceeded as error:
                failed.append(error)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.sleep(1)
                assert not failed
                assert await ends.free_bytes() == FAR_BYTES - 128
                standing.set()
        finally:
            standing.set()
        assert [str(error) for error in failed] == ["the tensors of a message are not there any more"]
        await check_nothing_held(ends)


@needs_nixl
@pytest.mark.realtime
async def test_an_asker_that_leaves_frees_all_at_both_ends() -> None:
    async with linked_process() as ends:
        for wait_s in (0, 0.001, 0.003, 0.01, 0.03):
            with trio.move_on_after(wait_s):
                await encode(ends, Encode("a", pixels(4 * SIZE)))
        await check_nothing_held(ends)


async def test_what_does_not_fit_or_is_small_is_attached() -> None:
    road = TransferRoad(TransferMemory(lambda: bytes(32), MIB))
    small, large, huge = (Encode("a", pixels(size)) for size in (12, 3 * TRANSFERRED_BYTES_MIN, 3 * MIB))
    async with road.carry(large) as carriage:
        assert carriage.message is large  # the other end has not read this memory
    road.reader.offer()
    for each in (small, huge):
        async with road.carry(each) as carriage:
            assert carriage.message is each
    async with road.carry(large) as carriage:
        (tensor,) = carriage.message.tensors
        assert tensor.remote is not None
        assert len(tensor.data) == 0
        assert road.memory.free_bytes < MIB - 3 * TRANSFERRED_BYTES_MIN
        assert carriage.expire is not None
        carriage.expire()
        assert road.memory.free_bytes == MIB - 128
    assert road.memory.free_bytes == MIB - 128


async def test_places_outside_of_the_offered_memory_are_violations() -> None:
    reader = TransferRoad(TransferMemory(lambda: bytes(32), MIB)).reader
    stamp = bytes(STAMP_BYTES)

    def message(place: MemoryRange) -> Encode:
        asked = pixels(12)
        return Encode("a", evolve(asked, data=evolve(asked.data, data=memoryview(b""), remote=place)))

    with pytest.raises(PeerViolation, match="not read by way of trial"):
        reader.check(message(MemoryRange(0, 12, stamp)))
    reader._memory = OfferedMemory(b"agent", 4096, 1024, stamp)  # noqa: SLF001  # as after a trial
    reader.check(message(MemoryRange(1024 - 64 - 12, 12, stamp)))
    for place in (
        MemoryRange(1024 - 64 - 11, 12, stamp),
        MemoryRange(-1, 12, stamp),
        MemoryRange(0, 0, stamp),
        MemoryRange(2**63, 12, stamp),
        MemoryRange(0, 12, b"short"),
    ):
        with pytest.raises(PeerViolation, match="offered bytes"):
            reader.check(message(place))
    assert MEMORY_BYTES >= MIB


@needs_nixl
@pytest.mark.realtime
@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["", "tcp"])
async def test_a_sender_that_dies_at_any_moment_leaves_a_result_or_a_retryable_error(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport:
        monkeypatch.setenv("UCX_TLS", transport)
    for wait_ms in (1, 5, 10, 20, 40, 60, 80, 120, 160):
        async with linked_process() as ends:
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(expect_bytes_or_loss, ends)
                    await trio.sleep(wait_ms / 1000)
                    ends.process.kill()
                while ends.memory.free_bytes != ends.memory.size - 128 or ends.memory.transfers.reading_bytes:  # noqa: ASYNC110
                    await trio.sleep(0.01)


async def expect_bytes_or_loss(ends: Ends) -> None:
    try:
        result = await encode(ends, Encode("a", pixels(16 * SIZE)))
    except LinkLost:
        return
    assert result.item.data.data == bytes_of(16 * SIZE)
