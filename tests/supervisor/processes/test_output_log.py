"""The output of processes is kept in bounded files; a disk that is full, slow or gone costs nothing but the file."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from supervisor.processes.output_log import OutputLog, output_writer
from supervisor.telemetry.metrics import Metrics
from supervisor.threads.queued_writer import QueuedWriter, start_daemon_thread
from tests.rig.log_records import log_records

LIMIT_BYTES = 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


async def written_by_a_child(output_log: OutputLog, *pieces: bytes) -> OutputLog:
    """Let a child say something, and end."""
    output, write = output_log.pipe()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(output_log.copy_from, output)
        for piece in pieces:
            await trio.to_thread.run_sync(os.write, write, piece)
        os.close(write)
    return output_log


def events(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record.message for record in log_records(caplog)]


async def test_the_output_of_a_child_is_kept_in_two_files_of_bounded_size(path: Path) -> None:
    output_log = OutputLog(path, LIMIT_BYTES)
    for number in range(20):
        await written_by_a_child(output_log, f"{number:099d}\n".encode())
        assert output_log.file.flush(5.0)
    old = path.with_suffix(".1.log").read_bytes()
    assert (old + (path.read_bytes() if path.exists() else b"")).endswith(f"{19:099d}\n".encode())
    assert len(old) <= LIMIT_BYTES + 100
    assert sorted(each.name for each in path.parent.iterdir()) in (["engine.1.log", "engine.log"], ["engine.1.log"])


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory.\nbye", "torch.OutOfMemoryError: CUDA out of memory."),
        ("ValueError: a\n\nDuring handling of it:\n\nOSError: b\n", "OSError: b"),
        (
            "  File 'a', line 3\n    assert a == b\n           ~^^^^^\nAssertionError\nbye",
            "AssertionError: assert a == b",
        ),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("2026 ValueError: of a line of a log\nError loading: no", None),
    ],
)
async def test_the_last_error_is_the_last_exception_with_the_code_of_one_without_words(
    path: Path, lines: str, error: str | None
) -> None:
    output_log = await written_by_a_child(OutputLog(path), lines.encode())
    assert output_log.last_error == error


async def test_the_last_lines_are_those_of_the_end_however_long_the_output(path: Path) -> None:
    output_log = await written_by_a_child(OutputLog(path), b"x\n" * 50_000, b"ValueError: no such model\n", b"bye\n")
    assert output_log.reason("it exited with code 1") == "ValueError: no such model"
    assert len(output_log.tail) == 50
    output_log.tail.remove("ValueError: no such model")
    assert output_log.reason("it exited with code 1") == "it exited with code 1; its log ends: bye"


async def test_a_disk_that_hangs_stops_neither_the_loop_nor_the_engine(path: Path) -> None:
    goes_on, written = threading.Event(), []

    def hangs(data: bytes) -> None:
        goes_on.wait(20.0)
        written.append(data)

    output_log = OutputLog(path)
    output_log.file.sink, output_log.file.bytes_max = hangs, 4 * LIMIT_BYTES
    began = time.perf_counter()
    await written_by_a_child(output_log, *[b"x" * (LIMIT_BYTES - 1) + b"\n"] * 200)  # three times what a pipe holds
    assert time.perf_counter() - began < 15.0
    assert not goes_on.is_set()
    goes_on.set()
    assert output_log.file.flush(10.0)
    text = b"".join(written)
    lost = output_log.file.lost_bytes
    assert lost > 0
    notice = re.compile(rb"\n\[(\d+) bytes of output were lost\]\n")  # one or more: a short piece may have had room
    assert sum(map(int, notice.findall(text))) == lost
    assert len(notice.sub(b"", text)) == 200 * LIMIT_BYTES - lost


def test_a_writer_for_which_there_is_no_thread_tries_again_with_what_comes_next() -> None:
    written: list[bytes] = []
    none = ["can't start new thread"] * 2

    def start(run: Callable[[], None]) -> None:
        if none:
            raise RuntimeError(none.pop())
        start_daemon_thread(run)

    log = QueuedWriter(written.append, start=start)
    assert all([log.put(b"1"), log.put(b"2"), log.put(b"3")])  # and whoever says it does not fall
    assert log.flush(5.0)
    assert b"".join(written) == b"123"


def after_its_first_line(pause_s: float) -> tuple[QueuedWriter, list[bytes]]:
    """Return a writer that sleeps between writes, and what it has written."""
    written: list[bytes] = []
    log = QueuedWriter(written.append, pause_s=pause_s)
    log.put(b"1")
    while not (written and log.idle):
        threading.Event().wait(0.001)
    return log, written


def test_lines_that_come_in_the_pause_of_a_writer_are_written_together_and_a_flush_ends_it() -> None:
    log, written = after_its_first_line(pause_s=60.0)
    log.put(b"2")
    threading.Event().wait(0.05)  # a writer that wakes for each line has written it by then
    log.put(b"3")
    assert log.flush(5.0)
    assert written == [b"1", b"23"]


async def test_a_failing_folder_is_logged_once_and_again_when_it_works(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    place = path.parent / "logs"
    file = output_writer(place / "engine.log", LIMIT_BYTES)
    output_log = OutputLog(place / "engine.log", file=file)
    metrics = Metrics()
    metrics.logs["tiny-0"] = file
    for _ in range(3):
        await written_by_a_child(output_log, b"hello\n")
        assert file.flush(5.0)
    (record,) = log_records(caplog)
    assert (record.message, record.levelname) == ("the output of an engine cannot be written", "ERROR")
    assert (record.file, "No such file" in record.reason) == (str(place / "engine.log"), True)
    assert 'espalier_log_failing{log="tiny-0"} 1.0' in metrics.render({}).decode()
    assert 'espalier_log_lost_bytes_total{log="tiny-0"} 18.0' in metrics.render({}).decode()
    place.mkdir()
    await written_by_a_child(output_log, b"there again\n")
    assert file.flush(5.0)
    assert events(caplog)[1:] == ["the output of an engine is written again"]
    assert (place / "engine.log").read_text() == "\n[18 bytes of output were lost]\nthere again\n"
    assert 'espalier_log_failing{log="tiny-0"} 0.0' in metrics.render({}).decode()


async def test_a_full_disk_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = tmp_path / "engine.log"
    full.symlink_to("/dev/full")
    output_log = await written_by_a_child(OutputLog(full), b"hello\n")
    assert output_log.file.flush(5.0)
    assert ["No space left" in record.reason for record in log_records(caplog)] == [True]
