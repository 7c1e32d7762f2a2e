"""What a node says to its launcher arrives whole however it is cut, and nothing else arrives."""

from __future__ import annotations

import json
import os
import threading
from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from supervisor.launcher.parent_pipe import LINE_BYTES_MAX, UNSENT_BYTES_MAX, LineReader, ParentPipe, hear
from supervisor.telemetry.logs import readable_line


class Pieces(trio.abc.ReceiveStream):
    """A stream of the pieces that it was given."""

    def __init__(self, *pieces):
        self.pieces = list(pieces)

    async def receive_some(self, max_bytes=None):
        await trio.lowlevel.checkpoint()
        return self.pieces.pop(0) if self.pieces else b""

    async def aclose(self):
        await trio.lowlevel.checkpoint()


def read_all(*pieces):
    async def run():
        lines, found = LineReader(Pieces(*pieces)), []
        while (line := await lines.read()) is not None:
            found.append(line)
        return found

    return trio.run(run)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), cuts=st.sets(st.integers(1, 200)))
def test_lines_are_the_same_however_they_are_cut(text, cuts):
    data = text.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges) if start < end]
    wanted = text.split("\n")
    assert read_all(*pieces) == (wanted if wanted[-1] else wanted[:-1])


def test_a_line_without_an_end_comes_in_pieces():
    piece = b"x" * (LINE_BYTES_MAX // 2 + 1)
    assert [len(line) for line in read_all(piece, piece, piece, b"\n")] == [2 * len(piece), len(piece)]


async def test_what_a_node_says_is_heard_in_order_until_it_has_ended():
    reads, writes = os.pipe()
    upward = ParentPipe(writes)
    upward.say("up")
    os.write(writes, b'nonsense\n{"up": ""}\n["up", 1]\n["shout", ""]\n["up"]\n')
    upward.say("tell", "two\nlines, and ü")
    upward.say("failed", "it broke")
    upward.say("done")
    os.close(writes)
    async with trio.lowlevel.FdStream(reads) as stream:
        lines, heard = LineReader(stream), []
        while (said := await hear(lines)) is not None:
            heard.append(said)
    assert heard == [("up", ""), ("tell", "two\nlines, and ü"), ("failed", "it broke"), ("done", "")]


def test_a_launcher_that_is_gone_hears_nothing_and_harms_nobody():
    reads, writes = os.pipe()
    os.close(reads)
    ParentPipe(writes).say("up")
    os.close(writes)


def test_b4_a_launcher_that_does_not_read_stops_no_node_and_is_told_the_end_when_it_reads():
    reads, writes = os.pipe()
    upward = ParentPipe(writes)
    for _ in range(100_000):
        upward.pulse()
    for number in range(1000):
        upward.say("tell", f"{number} {'x' * 10_000}")
    upward.say("done")
    assert len(upward._unsent) < 2 * UNSENT_BYTES_MAX
    upward.end(0.0)
    heard = threading.Thread(target=lambda: pieces.extend(iter(lambda: os.read(reads, 65536), b"")))
    pieces = []
    heard.start()
    upward.end(10.0)
    os.close(writes)
    heard.join(10.0)
    os.close(reads)
    said = [json.loads(line) for line in b"".join(pieces).splitlines()]
    assert said[0] == ["pulse", ""]
    assert said[-1] == ["done", ""]
    told = [text.partition(" ")[0] for kind, text in said if kind == "tell"]
    assert told == [str(number) for number in range(len(told))]
    assert 0 < len(told) < 1000


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"level": "info", "node": "one", "event": "linked", "peer": "two"}, "07:08:09 one: linked  peer=two"),
        ({"level": "warning", "event": "no link", "why": None}, "07:08:09 warning: one: no link"),
        (
            {"level": "error", "event": "a bug", "traceback": "Trace\n  back"},
            "07:08:09 error: one: a bug\nTrace\n  back",
        ),
        (
            {"level": "info", "event": "one/links is ready", "child_event": "started"},
            "07:08:09 one: one/links is ready",
        ),
        ({"level": "info", "event": "one/links is starting", "child_event": "starting"}, None),
    ],
)
def test_what_a_node_logs_is_shown_to_a_person_with_the_nodes_name(given, wanted):
    assert readable_line("one", json.dumps({"time": "2026-11-21T07:08:09+0000", **given})) == wanted


@pytest.mark.parametrize("text", ["Traceback (most recent call last):", "[1, 2]", '{"event": "x"}', "7"])
def test_what_is_no_event_is_shown_as_it_is(text):
    assert readable_line("one", text) == f"one: {text}"
