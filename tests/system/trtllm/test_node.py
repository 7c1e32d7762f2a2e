"""A node whose engine is TensorRT-LLM's kind with two ranks, asked over HTTP: where requests go, and its memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import pytest

from bench.rig.node import ROOT, Node, node, short_folder
from tests.rig.trtllm_engines import FAKE

pytestmark = pytest.mark.realtime

ENGINE = """kind = "trtllm"
python = {python!r}
page_size = 16
kv_tokens_max = 8192
tensor_parallel = 2
data_parallel = 2
releases_memory = true
environment.PYTHONPATH = {path!r}
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Node]:
    engine = ENGINE.format(python=sys.executable, path=os.pathsep.join((str(ROOT), str(FAKE))))
    with short_folder() as folder, node(Path(folder), slots=4, engine=engine) as made:
        yield made


def post(running: Node, path: str, body: object) -> tuple[int, object, str]:
    """Return the status of an answer, what its JSON says, and its route."""
    headers = {**running.authorization, "content-type": "application/json"}
    with closing(HTTPConnection("127.0.0.1", running.port, timeout=30)) as connection:
        connection.request("POST", path, msgspec.json.encode(body), headers)
        answer = connection.getresponse()
        return answer.status, msgspec.json.decode(answer.read()), answer.headers.get("x-route", "").partition(";")[0]


def route(running: Node, number: int) -> str:
    asked = {"model": "tiny", "prompt": f"oak {number}", "max_tokens": 60, "ignore_eos": True}
    status, _, found = post(running, "/v1/completions", asked)
    assert status == 200
    return found


def test_each_rank_is_a_worker(running: Node) -> None:
    with ThreadPoolExecutor(6) as threads:  # asked together
        routes = {*threads.map(lambda number: route(running, number), range(6))}
    assert routes == {"main/tiny-0#0", "main/tiny-0#1"}
    for rank in range(2):
        assert running.metric("espalier_engine_slots", engine=f"main/tiny-0#{rank}") == 4


def test_its_memory_is_released_and_returns_by_http(running: Node) -> None:
    status, answer, _ = post(running, "/release_memory_occupation", {})
    assert status >= 400
    assert "leave out all other tags" in str(answer)
    assert route(running, 1)
    status, answer, _ = post(running, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    assert (status, "out of service: memory released: kv_cache, weights" in str(answer)) == (200, True)
    status, answer, _ = post(running, "/resume_memory_occupation", {})
    assert (status, "in service" in str(answer)) == (200, True)
    assert route(running, 1)
