"""The order of weight updates that every kind of engine keeps, in checks of the engine's contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress

import pytest
import trio

from actors.engines.port import Engine
from protocol.errors import BadRequest, EngineRefused, Overloaded
from protocol.messages.kind import Message
from protocol.messages.weights import (
    BeginWeightsUpdate,
    EndWeightsUpdate,
    GetWeightsChecksum,
    SetWeightsVersion,
    UpdateWeightsFromDisk,
    UpdateWeightsFromTensors,
    WeightsUpdated,
    WeightsVersion,
)
from protocol.tensors import Dtype, Tensor

GONE = "/gone"


def file_of(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """Return a safetensors file with these dtypes, shapes and bytes."""
    header: dict[str, object] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def update_of(file: bytes) -> UpdateWeightsFromTensors:
    """Return an update from the tensors of a file."""
    return UpdateWeightsFromTensors(Tensor(Dtype.UINT8, (len(file),), memoryview(file)))


async def refused(engine: Engine, request: Message, match: str) -> None:
    """Check that an engine refuses a request, and why."""
    with pytest.raises(BadRequest, match=match):
        await engine.operate(request)


async def keeps_the_order_of_weight_updates(engine: Engine) -> None:
    """A session is begun once, updated within, and ended once: with a version, or given up where nothing was replaced."""
    await trio.lowlevel.checkpoint()
    if "update-weights-from-tensors" not in engine.info.operations:
        return
    unknown = update_of(file_of({"no.such.weight": ("F32", [1], bytes(4))}))
    before = await engine.operate(GetWeightsChecksum())
    assert isinstance(before, WeightsUpdated)
    await refused(engine, unknown, "no session of updates is open")
    await refused(engine, EndWeightsUpdate("x"), "no session of updates is open")
    await engine.operate(BeginWeightsUpdate())
    assert await engine.operate(SetWeightsVersion()) == WeightsVersion(before.version, updating=True)
    with pytest.raises(EngineRefused, match="session of updates is open"):
        await engine.operate(BeginWeightsUpdate())
    await refused(engine, unknown, r"no\.such\.weight is no tensor of the model")
    for wrong in (b"", b"12345678", bytes(8), (99).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}}"):
        await refused(engine, update_of(wrong), "safetensors|header")
    await refused(engine, EndWeightsUpdate("x", whole=True), "replace every tensor")
    assert await engine.operate(EndWeightsUpdate("")) == before
    await engine.operate(BeginWeightsUpdate())
    ended = await engine.operate(EndWeightsUpdate("contract"))
    assert ended == WeightsUpdated("contract", before.checksum), "nothing was replaced"


async def serves_on_after_a_session_that_a_checksum_refuses(engine: Engine) -> None:
    """A session refused meanwhile left an engine in service that took no request."""
    await trio.lowlevel.checkpoint()
    if "update-weights-from-tensors" not in engine.info.operations:
        return
    before = await engine.operate(GetWeightsChecksum())
    assert isinstance(before, WeightsUpdated)
    over = trio.Event()

    async def checksums() -> None:
        while not over.is_set():
            with suppress(Overloaded):
                await engine.operate(GetWeightsChecksum())

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(checksums)
        for number in range(20):
            try:
                await engine.operate(BeginWeightsUpdate())
            except Overloaded:
                break  # and the next check has the engine serve
            while True:  # a checksum may run now, too
                with suppress(Overloaded):
                    await engine.operate(EndWeightsUpdate(f"{before.version}+{number}"))
                    break
                await trio.sleep(0.01)
        over.set()
    await engine.operate(SetWeightsVersion(before.version))


async def refuses_weights_of_no_folder(engine: Engine) -> None:
    """A folder that is not there changes nothing."""
    await trio.lowlevel.checkpoint()
    if "update-weights-from-disk" not in engine.info.operations:
        return
    before = await engine.operate(GetWeightsChecksum())
    await refused(engine, UpdateWeightsFromDisk(folder=GONE, version="gone"), "folder")
    await refused(engine, UpdateWeightsFromDisk(folder="relative", version="gone"), "folder|path")
    assert await engine.operate(GetWeightsChecksum()) == before
    named = await engine.operate(SetWeightsVersion("named"))
    assert named == WeightsVersion("named")
    assert await engine.operate(SetWeightsVersion()) == named
