"""The folder of the files that operations leave: its limit, its names, and files without an end."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from actors.engines.sglang.host.kept_files import LISTED_MAX, KeptFiles
from protocol.errors import BadRequest, NotReady
from protocol.messages.engine_files import PART_BYTES_MAX, FileEntry, FileList, FilePart, ListFiles, ReadFile
from protocol.messages.kind import Message


def files(tmp_path: Path, bytes_max: int = 100, **contents: int) -> KeptFiles:
    """Return a folder with files of these sizes, the oldest first."""
    kept = KeptFiles(tmp_path / "e.files", bytes_max)
    kept.begin("x", 0)
    kept.finish("x")
    for at, (name, size) in enumerate(contents.items(), start=1):
        kept.write(name, b"x" * size)
        os.utime(kept.folder / name, (at, at))
    return kept


def asked(kept: KeptFiles, request: Message) -> Message:
    async def ask() -> Message:
        return await kept.handlers[type(request)](request)

    return asyncio.run(ask())


def test_the_oldest_files_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    kept = files(tmp_path, a=60, b=50, c=40)
    kept.trim()
    assert asked(kept, ListFiles()) == FileList((FileEntry("b", 50), FileEntry("c", 40)), 100)
    kept = files(tmp_path / "large", d=101)
    kept.trim()
    assert [entry.name for entry in kept.entries()] == []
    kept = files(tmp_path / "many", **{f"f{number}": 0 for number in range(LISTED_MAX + 2)})
    kept.trim()
    assert len(kept.entries()) == LISTED_MAX


def test_a_file_is_read_part_by_part(tmp_path: Path) -> None:
    kept, data = files(tmp_path), os.urandom(PART_BYTES_MAX + 7)
    kept.write("a", data)
    first, last = asked(kept, ReadFile("a")), asked(kept, ReadFile("a", PART_BYTES_MAX))
    assert isinstance(first, FilePart)
    assert isinstance(last, FilePart)
    assert (first.data + last.data, first.size) == (data, len(data))
    assert asked(kept, ReadFile("a", len(data))) == FilePart("a", len(data), b"")


def test_links_hidden_and_strange_names_are_no_files(tmp_path: Path) -> None:
    kept = files(tmp_path, a=1)
    (tmp_path / "secret").write_text("s")
    (kept.folder / "link").symlink_to(tmp_path / "secret")
    (kept.folder / ".hidden").write_text("h")
    (kept.folder / "a b").write_text("h")
    os.mkfifo(kept.folder / "pipe")
    (kept.folder / "folder").mkdir()
    assert [entry.name for entry in kept.entries()] == ["a"]
    for name in ("link", ".hidden", "a b", "../secret", "", "a" * 200):
        with pytest.raises(BadRequest, match="there is no file"):
            asked(kept, ReadFile(name))


def test_a_file_that_is_being_written_is_hidden_and_removed_by_the_next_life(tmp_path: Path) -> None:
    kept = files(tmp_path, old=1)
    kept.begin("new", 0)
    kept.write("new-1", b"half")
    assert [entry.name for entry in kept.entries()] == ["old"]
    with pytest.raises(BadRequest, match="there is no file"):
        asked(kept, ReadFile("new-1"))
    assert kept.named("new") == ["new-1"]
    kept.trim()
    next_life = KeptFiles(kept.folder, 100)
    next_life.remove_unfinished()
    assert sorted(path.name for path in kept.folder.iterdir()) == ["old"]


def test_a_file_that_could_not_be_written_is_refused_before_it_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptFiles(tmp_path / "e.files", 100)
    with pytest.raises(NotReady, match=r"MB free, and it may take 8796093022208 MB"):
        kept.begin("a", 2**63)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotReady, match="nothing can be written into"):
        KeptFiles(tmp_path / "file" / "e.files", 100).begin("a", 0)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    with pytest.raises(NotReady, match="No such file"):
        kept.begin("a", 0)
    assert kept.entries() == []


def test_an_engine_that_has_left_nothing_has_no_folder(tmp_path: Path) -> None:
    kept = KeptFiles(tmp_path / "none", 100)
    kept.remove_unfinished()
    assert asked(kept, ListFiles()) == FileList((), 100)
    assert not kept.folder.exists()
