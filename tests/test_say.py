"""Off a terminal every line is JSON; on one a person can read it, and the live line stays apart from it."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re

import pytest
import trio
import trio.testing

from supervisor.run import Happening, Kind
from supervisor.say import CLEAR, TICK_S, Terminal, set_up


@pytest.fixture(autouse=True)
def _as_before():
    root, ours = logging.getLogger(), logging.getLogger("trio-websocket")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before


class Screen(io.StringIO):
    def isatty(self):
        return True


class Deaf(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


class Gone(Screen):
    """A terminal whose window has been closed."""

    tries = 0

    def write(self, text):
        self.tries += 1
        raise OSError(errno.EIO, "Input/output error")


log = logging.getLogger("espalier.test")


def happening(path, kind=Kind.STARTING):
    return Happening(path, kind, trio.current_time())


def shown(text):
    """What a terminal of endless width would show: its lines, the last of them being where the cursor is."""
    return [line.rpartition(CLEAR)[2] for line in text.split("\n")]


def test_off_a_terminal_every_line_is_one_json_object():
    out = io.StringIO()
    terminal = set_up(out)
    assert not terminal.live
    log.info("request ended", extra={"request_id": "r1", "took_s": 0.5, "why": None})
    log.warning("two\nlines, %s", "wörld 日本")
    try:
        int("x")
    except ValueError:
        log.exception("a bug", extra={"error": KeyError("k")})
    log.debug("not this")
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


def test_on_a_terminal_a_person_can_read_it():
    out = Screen()
    assert set_up(out).live
    log.info("request ended", extra={"request_id": "r1", "why": None})
    log.error("trouble")
    first, second, _ = out.getvalue().split("\n")
    assert re.fullmatch(r"\d\d:\d\d:\d\d request ended  request_id=r1", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d error: trouble", second)


def test_whoever_logs_does_not_fall_when_nobody_listens(monkeypatch):
    set_up(Deaf())
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.info("into the void")


async def test_the_live_line_says_what_is_starting_and_for_how_long(autojump_clock):
    out = Screen()
    terminal = Terminal(out, live=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(terminal.keep_live)
        for path in ("main", "main/zygote", "main/tiny-0", "main/tiny-0/engine"):
            terminal.watch(happening(path))
        await trio.sleep(1.05)
        assert shown(out.getvalue())[-1] == "  starting main/zygote 1.0 s, starting main/tiny-0/engine 1.0 s"
        terminal.watch(happening("main/zygote", Kind.STARTED))
        await trio.sleep(TICK_S)
        assert shown(out.getvalue())[-1] == "  starting main/tiny-0/engine 1.2 s"
        for path in ("main/tiny-0/engine", "main/tiny-0", "main"):
            terminal.watch(happening(path, Kind.STARTED))
        await trio.sleep(TICK_S)
        assert shown(out.getvalue())[-1] == ""
        size = len(out.getvalue())
        await trio.sleep(10)
        assert len(out.getvalue()) == size
        nursery.cancel_scope.cancel()


async def test_the_live_line_never_mixes_with_log_lines(autojump_clock):
    out = Screen()
    terminal = set_up(out)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(terminal.keep_live)
        terminal.watch(happening("main/engine"))
        for number in range(20):
            await trio.sleep(0.13)
            log.info("line", extra={"number": number})
        nursery.cancel_scope.cancel()
    lines = shown(out.getvalue())
    assert [re.sub(r"^[\d:]+ ", "", line) for line in lines[:20]] == [f"line  number={number}" for number in range(20)]
    assert all("\r" not in line.removeprefix(CLEAR) or CLEAR in line for line in out.getvalue().split("\n"))
    assert not any("starting" in line for line in lines[:20])


async def test_off_a_terminal_nothing_is_live(autojump_clock):
    out = io.StringIO()
    terminal = Terminal(out, live=False)
    terminal.watch(happening("main"))
    await terminal.keep_live()
    assert out.getvalue() == ""


async def test_a_terminal_that_is_gone_ends_nothing_but_its_live_line(autojump_clock):
    out = Gone()
    terminal = Terminal(out, live=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(terminal.keep_live)
        terminal.watch(happening("main", Kind.STOPPING))
        await trio.sleep(1.05)
        assert out.tries == 6
        terminal.tell("Ready")
        assert out.tries == 7
        nursery.cancel_scope.cancel()


def test_what_nobody_can_read_any_more_is_not_said_and_that_is_all():
    Terminal(io.StringIO(), live=False, plain=Deaf()).tell("Ready")
    out, plain = io.StringIO(), io.StringIO()
    Terminal(out, live=False, plain=plain).tell("Ready")
    assert (out.getvalue(), plain.getvalue()) == ("", "Ready\n")


def test_a_real_terminal_is_one():
    near, far = os.openpty()
    try:
        with os.fdopen(far, "w") as out:
            terminal = set_up(out)
            assert terminal.live
            log.info("hello")
            assert b"hello" in os.read(near, 1000)
    finally:
        os.close(near)


def test_the_websocket_library_does_not_chat():
    out = io.StringIO()
    set_up(out)
    logging.getLogger("trio-websocket").info("a message of %d bytes", 7)
    assert out.getvalue() == ""
