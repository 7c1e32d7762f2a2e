"""A log that is not read, or cannot be written, affects neither requests nor the shutdown."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import IO

import pytest

from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.node import MODEL, ROOT, Node, free_ports, start_process, wait_until
from bench.rig.processes import MARK
from tests.rig.launched import check_exit

pytestmark = pytest.mark.realtime

WITHIN_S = 90.0
REQUESTS = 500  # whose lines are more than twice what a pipe holds
CLUSTER = """\
[gateway]
port = {port}
[model.tiny]
path = "{tiny}"
[engine.tiny]
model = "tiny"
kind = "simulated"
kv_tokens_max = 65536
simulated.costs.fixed_s = 0.001
"""


@contextmanager
def logging_to(folder: Path, output: IO[bytes], text: str = CLUSTER) -> Iterator[Node]:
    """Run a node that logs to a file of ours, until it is ready and then for the body."""
    (port,) = free_ports(1)
    tmp, file = folder / "t", folder / "cluster.toml"
    tmp.mkdir(exist_ok=True)
    file.write_text(text.format(port=port, tiny=ROOT / "examples" / MODEL))
    (folder / "output").touch()
    mark = f"{os.getpid()}-{port}"
    process = start_process([str(file)], output, {"TMPDIR": str(tmp), MARK: mark})
    target = Node(process, port, folder, tmp, mark, time.perf_counter())
    try:
        target.wait_ready()
        yield target
    finally:
        target.end()


def ask(connection: HTTPConnection) -> int:
    """Ask for one token over a connection that is kept, and return the answer's status."""
    body = json.dumps({"model": MODEL, "prompt": "The oak", "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_an_unread_log_stops_neither_requests_nor_the_shutdown(folder: Path) -> None:
    reads, writes = os.pipe()
    same = os.dup(writes)
    with (
        os.fdopen(reads, "rb"),
        os.fdopen(same, "wb"),
        os.fdopen(writes, "wb") as output,
        logging_to(folder, output) as target,
    ):
        output.close()
        beside = BackgroundReader(Chat(target.port, chat_body("Tell me a long story", 1000)).read)
        connection = HTTPConnection("127.0.0.1", target.port, timeout=WITHIN_S)
        assert [ask(connection) for _ in range(REQUESTS)] == [200] * REQUESTS
        # Whatever number of bytes it holds: a write that does not fit behind the one before it begins a page.
        assert wait_until(lambda: not select.select([], [same], [], 0)[1], WITHIN_S) is not None, (
            "it logs until the pipe is full"
        )
        assert beside.wait(WITHIN_S).whole
        connection.close()
        target.signal(signal.SIGTERM)
        check_exit(target)


@pytest.mark.nightly
def test_a_full_disk_under_the_log_stops_neither_requests_nor_the_shutdown(folder: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as output, logging_to(folder, output) as target:
        beside = BackgroundReader(Chat(target.port, chat_body("Tell me a long story", 500)).read)
        connection = HTTPConnection("127.0.0.1", target.port, timeout=WITHIN_S)
        assert [ask(connection) for _ in range(100)] == [200] * 100
        assert target.metric("espalier_log_failing", log="main") == 1
        assert target.metric("espalier_log_lost_bytes_total", log="main") > 100 * 200
        connection.close()
        assert beside.wait(WITHIN_S).whole
        target.signal(signal.SIGTERM)
        check_exit(target)
