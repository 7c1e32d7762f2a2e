"""The removal of stale run folders touches what nodes of this user have left, and nothing that others put there."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from actors.engines import leftover_memory
from actors.engines.sglang import boot_message
from actors.engines.sglang.spec import SglangSpec
from protocol.errors import StartFailed
from supervisor.config.schema import DATA_PARALLEL_MAX
from supervisor.processes import run_folder

OTHER = 65534  # a user who is not this one


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(leftover_memory, "SHARED_MEMORY", place)
    return place


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def left(base: Path, name: str = "espalier-left", mode: int = 0o700) -> Path:
    """What a node that was killed has left: its folder, a host's in it."""
    folder = base / name
    (folder / "e1" / "deep").mkdir(parents=True)
    (folder / "e1" / "deep" / "file").write_text("x")
    (folder / "lock").touch()
    folder.chmod(mode)
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_what_a_killed_node_left_is_removed_with_its_shared_memory(base: Path, shared: Path) -> None:
    folder = left(base)
    for name in ("sglang_loads_x", "psm_1", "of_somebody_else"):
        (shared / name).touch()
    leftover_memory.record(folder / "e1", {"sglang_loads_x", "psm_1", "of_somebody_else", "../tmp/x"})
    assert run_folder.remove_stale(base, leftover_memory.remove) == [folder]
    assert not folder.exists()
    assert [path.name for path in shared.iterdir()] == ["of_somebody_else"]


def test_the_tensors_of_a_killed_host_are_removed_and_no_others(base: Path, shared: Path) -> None:
    folder = left(base)
    prefix, other = leftover_memory.record_tensors(folder / "e1"), f"{leftover_memory.TENSORS}{'0' * 32}_"
    for name in (f"{prefix}1", f"{prefix}27", f"{other}1", "sglang_loads_x", "psm_1"):
        (shared / name).touch()
    # A list may name anything, but nothing that would match the names of others.
    wrong = {"*", "psm_*", "sgl_*", f"{leftover_memory.TENSORS}*", f"{other[:-2]}*", f"{other}1*", "../shm/psm_*"}
    leftover_memory.record(folder / "e1", wrong)
    assert run_folder.remove_stale(base, leftover_memory.remove) == [folder]
    assert sorted(path.name for path in shared.iterdir()) == ["psm_1", f"{other}1", "sglang_loads_x"]


def test_a_folder_that_is_held_stays(base: Path, shared: Path) -> None:
    folder = left(base)
    with held(folder):
        assert run_folder.remove_stale(base, leftover_memory.remove) == []
    assert (folder / "e1" / "deep" / "file").exists()


def test_no_link_is_followed_out_of_the_temporary_folder(base: Path, shared: Path, tmp_path: Path) -> None:
    """/var/lib/dpkg has a file `lock`, and so have many others."""
    precious = left(tmp_path, "dpkg")
    (base / "espalier-evil").symlink_to(precious)
    assert run_folder.remove_stale(base, leftover_memory.remove) == []
    assert (precious / "e1" / "deep" / "file").exists()


def test_nor_any_link_within_a_folder(base: Path, shared: Path, tmp_path: Path) -> None:
    precious = left(tmp_path, "precious")
    folder = left(base)
    (folder / "e2").symlink_to(precious)
    (folder / "e1" / "link").symlink_to(precious)
    (precious / "shared-memory").write_text("psm_hers")
    (shared / "psm_hers").touch()
    (folder / "e3").mkdir()
    (folder / "e3" / "shared-memory").symlink_to(precious / "shared-memory")
    leftover_memory.remove(folder / "e2")
    assert run_folder.remove_stale(base, leftover_memory.remove) == [folder]
    assert (precious / "e1" / "deep" / "file").exists()
    assert (shared / "psm_hers").exists()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o1700])
def test_a_folder_that_others_may_enter_is_none_of_ours(base: Path, shared: Path, mode: int) -> None:
    folder = left(base, mode=mode)
    assert run_folder.remove_stale(base, leftover_memory.remove) == []
    assert folder.exists()


def test_a_strangers_folder_and_what_it_lists_stay(base: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(base)
    (folder / "e1" / "shared-memory").write_text("psm_1")
    (shared / "psm_1").touch()
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert run_folder.remove_stale(base, leftover_memory.remove) == []
    leftover_memory.remove(folder / "e1")
    assert (folder / "e1" / "deep" / "file").exists()
    assert (shared / "psm_1").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_shared_memory_of_another_user_stays_though_our_own_list_names_it(base: Path, shared: Path) -> None:
    folder = left(base)
    (folder / "e1" / "shared-memory").write_text("psm_theirs psm_ours psm_link psm_folder")
    for name in ("psm_theirs", "psm_ours"):
        (shared / name).touch()
    os.chown(shared / "psm_theirs", OTHER, OTHER)
    (shared / "psm_link").symlink_to(shared / "psm_theirs")
    (shared / "psm_folder").mkdir()
    assert run_folder.remove_stale(base, leftover_memory.remove) == [folder]
    assert sorted(path.name for path in shared.iterdir()) == ["psm_folder", "psm_link", "psm_theirs"]


def test_a_disk_without_room_is_one_clear_sentence(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with (
        pytest.raises(StartFailed, match=r"^no folder can be made in .*: No space left on device$"),
        run_folder.run_folder(base, leftover_memory.remove),
    ):
        raise AssertionError


def test_o_a_lock_that_is_not_the_one_that_is_held_is_taken_anew(base: Path) -> None:
    with run_folder.run_folder(base, leftover_memory.remove) as folder:
        (folder.path / "lock").unlink()
        (folder.path / "lock").touch()
        was_intact = folder.is_intact
        folder.restore()
        assert (was_intact, folder.is_intact) == (False, True)
        assert run_folder.remove_stale(base, leftover_memory.remove) == [], "a node that lives holds it"


def test_the_longest_socket_of_an_engine_fits_below_the_longest_base_folder(tmp_path: Path) -> None:
    folder = f"{'/x'.ljust(run_folder.BASE_BYTES_MAX, 'x')}/{run_folder.PREFIX}12345678/e12345678"
    spec = SglangSpec("x", "/models/x", "cpu", 4, 4096, publishes=True, data_parallel=DATA_PARALLEL_MAX)
    events = boot_message.build(spec, folder).events
    paths = [each.removeprefix("ipc://") for rank in events for each in (rank.endpoint, rank.replay_endpoint)]
    with tempfile.NamedTemporaryFile(dir=tmp_path) as of_sglang:  # its own sockets have such names
        paths.append(f"{folder}/{Path(of_sglang.name).name}")
    assert len(max(paths, key=len)) <= 107, "a Unix socket's address has no room for more"


def test_run_folders_lie_in_a_short_folder_where_the_temporary_one_is_too_long_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tmp_path / "s"
    short.mkdir()
    monkeypatch.setattr(run_folder, "SHORT_BASES", (str(tmp_path / "missing"), str(short)))
    longest = "/x".ljust(run_folder.BASE_BYTES_MAX, "x")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: longest)
    assert run_folder.base_folder() == Path(longest)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: f"{longest}x")
    assert run_folder.base_folder() == short
    monkeypatch.setattr(run_folder, "SHORT_BASES", (str(tmp_path / "missing"),))
    with pytest.raises(StartFailed, match=r"path of 55 bytes, .* set TMPDIR to a folder of at most 54 bytes"):
        run_folder.base_folder()
