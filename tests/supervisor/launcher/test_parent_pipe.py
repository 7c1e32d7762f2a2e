"""Messages of a node arrive whole at its launcher however the stream is cut, and other lines are no messages."""

from __future__ import annotations

import json
import os
import threading
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from supervisor.launcher.parent_pipe import LINE_BYTES_MAX, UNSENT_BYTES_MAX, LineReader, ParentPipe, receive
from supervisor.telemetry.logs import readable_line


class Pieces(trio.abc.ReceiveStream):
    """A stream of the pieces that it was given."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        await trio.lowlevel.checkpoint()
        return self.pieces.pop(0) if self.pieces else b""

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


def read_all(*pieces: bytes) -> list[str]:
    async def run() -> list[str]:
        lines, found = LineReader(Pieces(*pieces)), []
        while (line := await lines.read()) is not None:
            found.append(line)
        return found

    return trio.run(run)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), cuts=st.sets(st.integers(1, 200)))
def test_lines_are_the_same_however_they_are_cut(text: str, cuts: set[Any]) -> None:
    data = text.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges) if start < end]
    wanted = text.split("\n")
    assert read_all(*pieces) == (wanted if wanted[-1] else wanted[:-1])


def test_a_line_without_an_end_comes_in_pieces() -> None:
    piece = b"x" * (LINE_BYTES_MAX // 2 + 1)
    assert [len(line) for line in read_all(piece, piece, piece, b"\n")] == [2 * len(piece), len(piece)]


async def test_messages_are_received_in_order_until_the_node_has_ended() -> None:
    reads, writes = os.pipe()
    pipe = ParentPipe(writes)
    pipe.send("up")
    os.write(writes, b'nonsense\n{"up": ""}\n["up", 1]\n["shout", ""]\n["up"]\n')
    pipe.send("announce", "two\nlines, and ü")
    pipe.send("failed", "it broke")
    pipe.send("done")
    os.close(writes)
    async with trio.lowlevel.FdStream(reads) as stream:
        lines, messages = LineReader(stream), []
        while (message := await receive(lines)) is not None:
            messages.append(message)
    assert messages == [("up", ""), ("announce", "two\nlines, and ü"), ("failed", "it broke"), ("done", "")]


def test_a_launcher_that_has_gone_makes_no_node_fail() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    ParentPipe(writes).send("up")
    os.close(writes)


def test_a_launcher_that_does_not_read_blocks_no_node_and_gets_the_final_message_once_it_reads() -> None:
    reads, writes = os.pipe()
    pipe = ParentPipe(writes)
    for _ in range(100_000):
        pipe.heartbeat()
    for number in range(1000):
        pipe.send("announce", f"{number} {'x' * 10_000}")
    pipe.send("done")
    assert pipe.unsent_bytes < 2 * UNSENT_BYTES_MAX
    pipe.flush(0.0)
    reader = threading.Thread(target=lambda: pieces.extend(iter(lambda: os.read(reads, 65536), b"")))
    pieces: list[bytes] = []
    reader.start()
    pipe.flush(10.0)
    os.close(writes)
    reader.join(10.0)
    os.close(reads)
    messages = [json.loads(line) for line in b"".join(pieces).splitlines()]
    assert messages[0] == ["heartbeat", ""]
    assert messages[-1] == ["done", ""]
    announced = [text.partition(" ")[0] for kind, text in messages if kind == "announce"]
    assert announced == [str(number) for number in range(len(announced))]
    assert 0 < len(announced) < 1000


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
def test_a_log_record_is_shown_to_a_person_with_the_name_of_its_node(given: dict[str, Any], wanted: str | None) -> None:
    assert readable_line("one", json.dumps({"time": "2026-11-21T07:08:09+0000", **given})) == wanted


@pytest.mark.parametrize("text", ["Traceback (most recent call last):", "[1, 2]", '{"event": "x"}', "7"])
def test_a_line_that_is_no_record_is_shown_unchanged(text: str) -> None:
    assert readable_line("one", text) == f"one: {text}"
