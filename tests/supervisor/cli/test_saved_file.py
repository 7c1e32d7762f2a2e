"""A file of an engine is saved whole or not at all, wherever the operator wants it."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest
import trio

from protocol.errors import BadRequest, EngineLost
from protocol.messages.engine_files import ReadFile
from protocol.messages.kind import Message
from supervisor.cli.saved_file import AskForFields, saved_file

DATA = bytes(range(256)) * 10


def engine_with(data: bytes, size: int | None = None, piece: int = 1000) -> AskForFields:
    """Return an engine that has a file of these bytes, and says that it has `size`."""

    async def ask(request: Message) -> object:
        await trio.lowlevel.checkpoint()
        assert isinstance(request, ReadFile)
        part = data[request.offset : request.offset + piece]
        return {"name": request.name, "size": len(data) if size is None else size, "data": b64encode(part).decode()}

    return ask


@pytest.mark.parametrize("data", [DATA, b""])
async def test_a_file_is_saved_under_its_own_name_in_a_folder_or_as_the_file_that_is_named(
    tmp_path: Path, data: bytes
) -> None:
    done = await saved_file(ReadFile("a.gz"), engine_with(data), tmp_path)
    assert done == {"saved": str(tmp_path / "a.gz"), "bytes": len(data)}
    await saved_file(ReadFile("a.gz"), engine_with(data), tmp_path / "b")
    assert [path.read_bytes() for path in (tmp_path / "a.gz", tmp_path / "b")] == [data, data]
    assert {path.name for path in tmp_path.iterdir()} == {"a.gz", "b"}


@pytest.mark.parametrize("answer", [{"size": 9, "data": "%"}, {"data": ""}, [], {"size": 9, "data": ""}])
async def test_an_answer_that_is_no_part_leaves_the_old_file_as_it_was(tmp_path: Path, answer: object) -> None:
    (tmp_path / "a").write_text("old")

    async def ask(_: Message) -> object:
        await trio.lowlevel.checkpoint()
        return answer

    with pytest.raises(ValueError, match=r"."):
        await saved_file(ReadFile("a"), ask, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


async def test_an_engine_that_is_lost_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    whole = engine_with(DATA)

    async def ask(request: Message) -> object:
        assert isinstance(request, ReadFile)
        if request.offset:
            raise EngineLost("gone")
        return await whole(request)

    with pytest.raises(EngineLost):
        await saved_file(ReadFile("a"), ask, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["../a", ".a", "a/b", "", "-rf"])
async def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_asked(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match="there is no file"):
        await saved_file(ReadFile(name), engine_with(DATA), tmp_path)
