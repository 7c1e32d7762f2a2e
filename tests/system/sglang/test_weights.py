"""New weights on the real engine: twenty updates under streams, and what would end its scheduler, refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from actors.engines.port import Engine
from bench.rig.node import MODEL, ROOT
from protocol.errors import BadRequest, NotReady
from protocol.messages.leaving import RunningRequests
from protocol.messages.weights import (
    BeginWeightsUpdate,
    EndWeightsUpdate,
    GetWeightsChecksum,
    InitWeightsGroup,
    UpdateWeightsFromDisk,
    UpdateWeightsFromGroup,
    UpdateWeightsFromIpc,
    WeightsUpdated,
)
from protocol.safetensors import header_of
from protocol.weight_versions import WeightVersions
from tests.contracts.engine import at_rest, request, slot
from tests.contracts.versions import versions_of
from tests.contracts.weights import file_of, update_of
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

FOLDER = ROOT / "examples" / MODEL
UPDATES = 20
STREAMS = 4
TOKENS = 200
NORM = "model.norm.weight"


def other_checkpoint(folder: Path, number: bytes = b"\x40\x3f") -> Path:
    """Return the folder of a checkpoint like the example's, in which one tensor has this number, by default 0.75."""
    folder.mkdir()
    file = bytearray((FOLDER / "model.safetensors").read_bytes())
    header = header_of(memoryview(file))
    placed = header.tensors[NORM]
    for place in range(header.data_at + placed.begin, header.data_at + placed.end, 2):
        file[place : place + 2] = number  # in bfloat16
    (folder / "model.safetensors").write_bytes(file)
    (folder / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    return folder


async def checksum(engine: Engine) -> str:
    """Return the checksum of an engine's weights."""
    present = await engine.operate(GetWeightsChecksum())
    assert isinstance(present, WeightsUpdated)
    return present.checksum


@pytest.mark.nightly
async def test_weights_are_replaced_under_streams_and_killers_are_refused(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    other = other_checkpoint(tmp_path / "other")
    async with make_engine() as engine:
        first = await checksum(engine)
        await refuses_what_would_end_its_scheduler(engine, tmp_path)
        assert await checksum(engine) == first
        answers = await updated_under_streams(engine, (other, FOLDER))
        assert await checksum(engine) == first, "the last of the updates came from the first folder"
        await at_rest(engine)
    assert len(answers) >= STREAMS
    for spans in answers:
        assert sum(count for _, count in spans) == TOKENS, "each token has its version"
        steps = [int(version.removeprefix("step-")) if version != "tried" else -1 for version, _ in spans]
        assert steps == sorted(set(steps))
    assert any(len(spans) > 1 for spans in answers), "no answer was held over an update"


async def updated_under_streams(engine: Engine, folders: tuple[Path, Path]) -> list[WeightVersions]:
    """Update an engine from disk and from tensors in turns, while it answers; return the versions of each answer."""
    answers: list[WeightVersions] = []
    checksums: dict[Path, set[str]] = {folder: set() for folder in folders}
    files = {folder: (folder / "model.safetensors").read_bytes() for folder in folders}
    done = trio.Event()

    async def ask() -> None:
        await trio.lowlevel.checkpoint()
        while not done.is_set():
            with suppress(NotReady):  # it came while the engine stood still
                async with slot(engine, request(engine, TOKENS)) as generation:
                    answers.append(await versions_of(generation))
            await trio.sleep(0.005)

    async with trio.open_nursery() as nursery:
        for _ in range(STREAMS):
            nursery.start_soon(ask)
        for number in range(UPDATES):
            await trio.sleep(0.05)
            folder, version = folders[number % 2], f"step-{number}"
            if number % 4 < 2:
                updated = await engine.operate(
                    UpdateWeightsFromDisk(folder=str(folder), version=version, running=RunningRequests.HOLD)
                )
            else:
                await engine.operate(BeginWeightsUpdate(running=RunningRequests.HOLD))
                await engine.operate(update_of(files[folder]))
                updated = await engine.operate(EndWeightsUpdate(version))
            assert isinstance(updated, WeightsUpdated)
            assert updated.version == version
            checksums[folder].add(updated.checksum)
        done.set()
    assert [len(each) for each in checksums.values()] == [1, 1], "disk and tensors give the same weights"
    assert checksums[folders[0]] != checksums[folders[1]]
    return answers


async def refuses_what_would_end_its_scheduler(engine: Engine, tmp_path: Path) -> None:
    """Each of these kills a scheduler, leaves it waiting, or is a success that does nothing."""
    shape, dtype = file_of({NORM: ("BF16", [3], bytes(6))}), file_of({NORM: ("F32", [128], bytes(512))})
    unknown = file_of({"no.such.weight": ("F32", [1], bytes(4))})
    configuration = json.loads((FOLDER / "config.json").read_text())

    async def refuse(asked: object, match: str) -> None:
        with pytest.raises(BadRequest, match=match):
            await engine.operate(asked)  # type: ignore[arg-type]  # each is a message

    for number, (file, changes) in enumerate(
        [
            *((file, {}) for file in (shape, dtype, unknown)),
            ((FOLDER / "model.safetensors").read_bytes(), {"architectures": ["OtherForCausalLM"]}),
        ]
    ):
        folder = tmp_path / f"wrong-{number}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(file)
        (folder / "config.json").write_text(json.dumps(configuration | changes))
        await refuse(UpdateWeightsFromDisk(folder=str(folder), version="wrong"), "running model")
    await refuse(UpdateWeightsFromDisk(folder=str(tmp_path / "gone"), version="wrong"), "no folder")
    await refuse(update_of(shape), "no session")
    await refuse(EndWeightsUpdate("wrong"), "no session")
    await refuse(InitWeightsGroup(address="127.0.0.1", port=1, world_size=2, wait_s=0.1), "nothing listens")
    await refuse(InitWeightsGroup(address="127.0.0.1", port=1, world_size=1, wait_s=0.1), "not in a group of 1")
    await refuse(UpdateWeightsFromIpc(sockets={"GPU-0": "ipc:///x"}, version="wrong"), "CUDA")
    await engine.operate(BeginWeightsUpdate())
    for file, why in ((shape, r"BF16 \[3\]"), (dtype, r"F32 \[128\]"), (unknown, "is no tensor of the model")):
        await refuse(update_of(file), why)
    await refuse(BeginWeightsUpdate(), "is open")
    await refuse(UpdateWeightsFromGroup((NORM,)), "is in no group")
    await engine.operate(EndWeightsUpdate("tried"))
