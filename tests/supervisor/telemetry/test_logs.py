"""A log is JSON unless it goes to a terminal; there its lines are readable, above a live line."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.telemetry.bounded_json import VALUE_CHARACTERS_MAX
from supervisor.telemetry.logs import (
    CLEAR,
    TICK_S,
    JsonFormatter,
    Terminal,
    configure_logging,
    log_interpreter_warnings,
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("trio-websocket")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedOutput(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class ClosedTerminal(Screen):
    """A terminal whose window has been closed."""

    tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise OSError(errno.EIO, "Input/output error")


log = logging.getLogger("espalier.test")


def child_event(path: str, kind: ChildEventKind = ChildEventKind.STARTING) -> ChildEvent:
    return ChildEvent(path, kind, trio.current_time())


def shown(text: str) -> list[Any]:
    """Return the lines that a terminal of endless width would show; the cursor is in the last."""
    return [line.rpartition(CLEAR)[2] for line in text.split("\n")]


async def settled(terminal: Terminal, seconds: float) -> None:
    """Let time pass in ticks, and all that is logged be written."""
    until = trio.current_time() + seconds
    while True:
        await wait_all_tasks_blocked()
        assert terminal.log.flush(5.0)
        if trio.current_time() >= until:
            return
        await trio.sleep(min(TICK_S, until - trio.current_time()))


def test_without_a_terminal_every_line_is_one_json_object() -> None:
    out = io.StringIO()
    terminal = configure_logging(out)
    assert not terminal.live
    log.info("request ended", extra={"request_id": "r1", "took_s": 0.5, "why": None})
    log.warning("two\nlines, %s", "wörld 日本")
    try:
        int("x")
    except ValueError:
        log.exception("a bug", extra={"error": KeyError("k")})
    log.debug("not this")
    terminal.flush()
    first, second, third = [json.loads(line) for line in out.getvalue().splitlines()]
    assert {key: first[key] for key in ("level", "event", "request_id", "took_s", "why")} == {
        "level": "info",
        "event": "request ended",
        "request_id": "r1",
        "took_s": 0.5,
        "why": None,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", first["time"])
    assert (second["event"], second["level"]) == ("two\nlines, wörld 日本", "warning")
    assert "ValueError" in third["traceback"]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_lines_are_readable() -> None:
    out = Screen()
    terminal = configure_logging(out)
    assert terminal.live
    log.info("request ended", extra={"request_id": "r1", "why": None})
    log.error("trouble")
    terminal.flush()
    first, second, _ = out.getvalue().split("\n")
    assert re.fullmatch(r"\d\d:\d\d:\d\d request ended  request_id=r1", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d error: trouble", second)


def test_logging_to_a_closed_output_raises_no_error() -> None:
    terminal = configure_logging(ClosedOutput())
    log.info("into the void")
    terminal.flush()
    assert terminal.log.lost_items == 1


async def test_the_live_line_shows_what_is_starting_and_for_how_long(autojump_clock: MockClock) -> None:
    out = Screen()
    terminal = Terminal(out, live=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(terminal.run_live_line)
        for path in ("main", "main/zygote", "main/tiny-0", "main/tiny-0/engine"):
            terminal.on_event(child_event(path))
        await settled(terminal, 1.05)
        assert shown(out.getvalue())[-1] == "  starting main/zygote 1.0 s, starting main/tiny-0/engine 1.0 s"
        terminal.on_event(child_event("main/zygote", ChildEventKind.STARTED))
        await settled(terminal, TICK_S)
        assert shown(out.getvalue())[-1] == "  starting main/tiny-0/engine 1.2 s"
        for path in ("main/tiny-0/engine", "main/tiny-0", "main"):
            terminal.on_event(child_event(path, ChildEventKind.STARTED))
        await settled(terminal, TICK_S)
        assert shown(out.getvalue())[-1] == ""
        size = len(out.getvalue())
        await settled(terminal, 10)
        assert len(out.getvalue()) == size
        nursery.cancel_scope.cancel()


async def test_the_live_line_never_mixes_with_log_lines(autojump_clock: MockClock) -> None:
    out = Screen()
    terminal = configure_logging(out)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(terminal.run_live_line)
        terminal.on_event(child_event("main/engine"))
        for number in range(20):
            await settled(terminal, 0.13)
            log.info("line", extra={"number": number})
        await settled(terminal, 0)
        nursery.cancel_scope.cancel()
    lines = shown(out.getvalue())
    assert [re.sub(r"^[\d:]+ ", "", line) for line in lines[:20]] == [f"line  number={number}" for number in range(20)]
    assert all("\r" not in line.removeprefix(CLEAR) or CLEAR in line for line in out.getvalue().split("\n"))
    assert not any("starting" in line for line in lines[:20])


async def test_without_a_terminal_there_is_no_live_line(autojump_clock: MockClock) -> None:
    out = io.StringIO()
    terminal = Terminal(out, live=False)
    terminal.on_event(child_event("main"))
    await terminal.run_live_line()
    assert out.getvalue() == ""


async def test_a_closed_terminal_does_not_end_the_live_line_with_an_error(autojump_clock: MockClock) -> None:
    out = ClosedTerminal()
    terminal = Terminal(out, live=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(terminal.run_live_line)
        terminal.on_event(child_event("main", ChildEventKind.STOPPING))
        await settled(terminal, 1.05)
        assert out.tries == 6
        terminal.announce("Ready")
        await settled(terminal, 0)
        assert out.tries == 7
        nursery.cancel_scope.cancel()


def test_without_a_terminal_an_announcement_is_a_line_of_json() -> None:
    out, plain = io.StringIO(), io.StringIO()
    terminal = Terminal(out, live=False, stdout=plain, formatter=JsonFormatter("front"))
    for text in ("", "Ready: http://127.0.0.1:8000", ""):
        terminal.announce(text)
    terminal.flush()
    (line,) = plain.getvalue().splitlines()
    assert (
        json.loads(line).items() >= {"event": "Ready: http://127.0.0.1:8000", "level": "info", "node": "front"}.items()
    )
    assert out.getvalue() == ""


# A log without a reader -------------------------------------------------------------------------


@pytest.fixture
def unread() -> Iterator[tuple[io.FileIO, io.TextIOWrapper[io._WrappedBuffer]]]:
    """Yield both ends of a pipe with the smallest possible buffer, as files."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(reads, "rb", buffering=0) as ours, os.fdopen(writes, "w") as theirs:
        yield ours, theirs


def test_logging_never_waits_for_the_reader_of_the_log(
    unread: tuple[io.FileIO, io.TextIOWrapper[io._WrappedBuffer]],
) -> None:
    ours, theirs = unread
    terminal = configure_logging(theirs)
    terminal.log.bytes_max = 64 * 1024
    began = time.thread_time()
    for number in range(2000):
        log.info("request ended", extra={"number": number})
    assert time.thread_time() - began < 5.0  # of CPU time; if it waited at all, it would wait for ever
    lost = terminal.log.lost_items
    assert 0 < lost < 2000
    assert not terminal.log.flush(0.01)
    read = threading.Thread(target=lambda: pieces.extend(iter(lambda: ours.read(65536), b"")))
    pieces: list[bytes] = []
    read.start()
    assert terminal.log.flush(10.0)
    log.info("after all")
    assert terminal.log.flush(10.0)
    theirs.close()
    read.join(10.0)
    text = b"".join(pieces)
    lines = [json.loads(line) for line in text.splitlines()]
    numbers = [each["number"] for each in lines if "number" in each]
    notices = [each["event"] for each in lines if "lost" in each["event"]]
    assert numbers == sorted(set(numbers))
    assert len(numbers) + lost == 2000
    assert sum(int(notice.partition(" ")[0]) for notice in notices) == lost
    assert lines[-2]["event"] == notices[-1]
    assert notices[-1].endswith("lost: nobody read them in time")
    assert lines[-1]["event"] == "after all"


def test_the_live_line_does_not_queue_up_while_a_terminal_is_stopped(
    unread: tuple[io.FileIO, io.TextIOWrapper[io._WrappedBuffer]],
) -> None:
    _, theirs = unread
    terminal = Terminal(theirs, live=True, transient={"main/engine": ("starting", 0.0)})
    for tick in range(1000):
        terminal.redraw(tick)
        terminal.log.flush(0.0)
    assert terminal.log.queued_bytes < 100


def test_the_length_of_a_record_is_bounded() -> None:
    out = io.StringIO()
    terminal = configure_logging(out)
    huge = "x" * 1_000_000
    nested = {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}
    log.info(
        huge, extra={"reason": huge, "many": [huge] * 1000, "number": 10**5000, "error": ValueError(huge), **nested}
    )
    try:
        int("x" * 4000)
    except ValueError:
        log.exception("a bug")
    terminal.flush()
    first, second = out.getvalue().splitlines()
    assert len(first) < 100 * VALUE_CHARACTERS_MAX
    assert len(second) < 20 * VALUE_CHARACTERS_MAX
    line = json.loads(first)
    assert line["reason"] == f"{'x' * VALUE_CHARACTERS_MAX}... (1000000 characters)"
    assert (len(line["many"]), line["number"]) == (64, "a large number")
    assert json.loads(second)["traceback"].startswith("Traceback")


def test_warnings_of_the_interpreter_are_lines_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    out = io.StringIO()
    terminal = configure_logging(out)
    log_interpreter_warnings()
    try:
        sys.unraisablehook(SimpleNamespace(err_msg="ignored in f", exc_value=ValueError("odd"), object=None))
        log.info("a record %d that lies", "x")
    finally:
        logging.captureWarnings(False)
    terminal.flush()
    first, second = [json.loads(line) for line in out.getvalue().splitlines()]
    assert "ValueError: odd" in first["traceback"]
    assert second["event"] == "a log record could not be formatted: TypeError"
