"""Files below one folder are read, and nothing else is: by no path, no link and no device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from protocol.errors import BadRequest, DeadlineExceeded, TooLarge
from supervisor.media import files
from supervisor.media.contents import sealed_size
from supervisor.media.files import MediaFiles
from supervisor.media.urls import FileUrl
from tests.rig.media import open_descriptors

pytestmark = pytest.mark.realtime


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Return a folder that may be read, beside one with a secret."""
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "pictures2").mkdir()
    (tmp_path / "pictures2" / "secret").write_bytes(b"secret")
    (folder / "a.png").write_bytes(b"content")
    (folder / "inner" / "b.png").write_bytes(b"inner")
    (folder / "link.png").symlink_to("inner/b.png")
    (folder / "out.png").symlink_to("../secret")
    (folder / "absolute.png").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "device").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    return folder  # type: ignore[return-value]


async def read(root: Path, path: object, bytes_max: int = 100) -> bytes:
    content = await MediaFiles(root, 5.0).read(FileUrl(str(path)), bytes_max, owner="alice")
    try:
        assert sealed_size(content.descriptor) == content.size_bytes
        return os.pread(content.descriptor, 1_000, 0)
    finally:
        content.close()


async def test_a_file_below_the_folder_is_read(root: Path) -> None:
    assert await read(root, root / "a.png") == b"content"
    assert await read(root, root / "inner" / "b.png") == b"inner"
    assert await read(root, f"{root}//inner/../a.png") == b"content"


async def test_a_link_may_lead_to_a_file_below_the_folder(root: Path) -> None:
    assert await read(root, root / "link.png") == b"inner"


async def test_the_folder_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert await read(tmp_path / "alias", tmp_path / "alias" / "a.png") == b"content"
    assert await read(tmp_path / "alias", root / "a.png") == b"content"


@pytest.mark.parametrize(
    "path",
    [
        "out.png",
        "absolute.png",
        "folder/secret",
        "../secret",
        "inner/../../secret",
        "../pictures2/secret",
        "device",
        "pipe",
        "inner",
        "",
        "no.png",
        "a.png/x",
        "x" * 300,
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/environ",
        "/proc/self/root/etc/passwd",
        "/",
    ],
)
async def test_nothing_else_is_read_and_nobody_learns_whether_it_is_there(root: Path, path: str) -> None:
    before = open_descriptors()
    with trio.fail_after(60), pytest.raises(BadRequest, match="there is no such file in the folder"):
        await read(root, path if path.startswith("/") else f"{root}/{path}")
    assert open_descriptors() == before


async def test_a_file_that_is_changed_into_a_link_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first look and the reading, the path is exchanged: what was looked at is read."""
    opened, swapped = os.open, list[object]()

    def swap(path: object, flags: int, *rest: object, **options: object) -> int:
        found = opened(path, flags, *rest, **options)  # type: ignore[arg-type]
        if flags & os.O_PATH and not swapped:
            swapped.append(path)
            (root / "a.png").unlink()
            (root / "a.png").symlink_to("../secret")
        return found

    monkeypatch.setattr(os, "open", swap)
    assert await read(root, root / "a.png") == b"content"
    assert swapped


async def test_a_large_file_is_refused_before_it_is_whole(root: Path) -> None:
    with (root / "large").open("wb") as file:
        file.truncate(1 << 40)  # a hole
    with trio.fail_after(60), pytest.raises(TooLarge, match="can have 100 bytes"):
        await read(root, root / "large")


async def test_a_disk_that_does_not_answer_ends_the_request_and_not_the_node(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    hangs = threading.Event()
    monkeypatch.setattr(files, "_open_below", lambda *_: hangs.wait() and None)
    with pytest.raises(DeadlineExceeded, match=r"not read within 0\.2 s"):
        await MediaFiles(root, 0.2).read(FileUrl(str(root / "a.png")), 100, owner="alice")
    hangs.set()
