"""The contract of every engine that has profiles and files of its operations; each check returns at once without."""

from __future__ import annotations

import json
from zlib import decompress

import pytest
from attrs import evolve

from actors.engines.port import Engine
from protocol.errors import BadRequest, Overloaded
from protocol.messages.engine_files import FileList, FilePart, ListFiles, ReadFile
from protocol.messages.profile import Activity, Profiled, ProfileEnd, Profiling, StartProfile, StopProfile
from tests.contracts import engine as contract

GZIP = 31  # zlib's word for a stream in gzip's format


async def read_file(engine: Engine, name: str) -> bytes:
    """Return a whole file of an engine, read part by part."""
    data = b""
    while True:
        part = await engine.operate(ReadFile(name, len(data)))
        assert isinstance(part, FilePart)
        assert part.data or part.size == len(data)
        data += part.data
        if len(data) >= part.size:
            return data


async def listed(engine: Engine) -> dict[str, int]:
    """Return the sizes of an engine's files by their names."""
    files = await engine.operate(ListFiles())
    assert isinstance(files, FileList)
    return {file.name: file.bytes for file in files.files}


async def trace(engine: Engine, ended: Profiled) -> list[dict[str, object]]:
    """Return the events of a profile, which is a listed file of trace events."""
    (name,) = ended.files
    data = await read_file(engine, name)
    assert (await listed(engine))[name] == len(data)
    events = json.loads(decompress(data, GZIP) if name.endswith(".gz") else data)["traceEvents"]
    assert isinstance(events, list)
    return events


async def profiles_until_it_is_stopped(engine: Engine) -> None:
    if "start-profile" not in engine.info.operations:
        return
    begun = await engine.operate(StartProfile(steps=100))
    assert isinstance(begun, Profiling)
    with pytest.raises(Overloaded, match="stop-profile ends it"):
        await engine.operate(StartProfile())
    assert not [name for name in await listed(engine) if name.startswith(begun.profile)], "it is not finished"
    await contract.complete(engine, contract.request(engine, 4))
    ended = await engine.operate(StopProfile())
    assert isinstance(ended, Profiled)
    assert (ended.profile, ended.ended) == (begun.profile, ProfileEnd.STOPPED)
    spans = [event for event in await trace(engine, ended) if event.get("ph") == "X"]
    assert spans
    assert all(isinstance(span["dur"], int | float) and span["dur"] >= 0 for span in spans)


async def a_profile_that_has_ended_by_itself_is_an_end(engine: Engine) -> None:
    if "start-profile" not in engine.info.operations:
        return
    begun = await engine.operate(StartProfile(steps=2))
    await contract.complete(engine, contract.request(engine, 8))
    ended = await engine.operate(StopProfile())
    assert isinstance(begun, Profiling)
    assert isinstance(ended, Profiled)
    assert (ended.profile, ended.ended) == (begun.profile, ProfileEnd.STEPS)
    assert await trace(engine, ended)


async def refuses_profiles_and_files_that_cannot_be(engine: Engine) -> None:
    if "start-profile" not in engine.info.operations:
        return
    with pytest.raises(BadRequest, match="no profile runs"):
        await engine.operate(StopProfile())
    right = StartProfile()
    wrong = (
        ("steps", evolve(right, steps=0)),
        ("steps", evolve(right, steps=101)),
        ("seconds", evolve(right, seconds=float("inf"))),
        ("seconds", evolve(right, seconds=0.0)),
    )
    for param, start in wrong:
        with pytest.raises(BadRequest) as refusal:
            await engine.operate(start)
        assert refusal.value.param == param
    if engine.info.kind == "simulated":
        with pytest.raises(BadRequest, match="no gpu, only cpu"):
            await engine.operate(evolve(right, activities=(Activity.GPU,)))
    for name in ("none", "../lock", ".", "a/b", "", "a" * 300):
        with pytest.raises(BadRequest) as refusal:
            await engine.operate(ReadFile(name))
        assert refusal.value.param == "name"
    for name, size in (await listed(engine)).items():
        for offset in (-1, size + 1):
            with pytest.raises(BadRequest) as refusal:
                await engine.operate(ReadFile(name, offset))
            assert refusal.value.param == "offset"
    with pytest.raises(BadRequest, match="no profile runs"):
        await engine.operate(StopProfile())


CHECKS = (
    profiles_until_it_is_stopped,
    a_profile_that_has_ended_by_itself_is_an_end,
    refuses_profiles_and_files_that_cannot_be,
)
