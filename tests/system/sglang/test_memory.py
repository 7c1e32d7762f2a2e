"""The release of a real engine's memory behind a node: streams that are held, refusals, and the process that lives on."""

from __future__ import annotations

import threading
import time
from http.client import HTTPConnection
from typing import Any

import msgspec
import pytest
from openai import OpenAI

from bench.rig.node import MODEL, Node, wait_until

pytestmark = pytest.mark.engine

TOKENS = 200
WITHIN_S = 60.0


def post(node: Node, path: str, **fields: object) -> tuple[int, Any]:
    """Return the status and the JSON of one POST."""
    connection = HTTPConnection("127.0.0.1", node.port, timeout=WITHIN_S)
    try:
        headers = {"content-type": "application/json", **node.authorization}
        connection.request("POST", path, msgspec.json.encode(fields), headers)
        answer = connection.getresponse()
        return answer.status, msgspec.json.decode(answer.read())
    finally:
        connection.close()


class Stream:
    """One streamed answer, read by a thread."""

    def __init__(self, client: OpenAI, **options: object) -> None:
        self.pieces: list[str] = []
        self._stream = client.completions.create(
            model=MODEL,
            prompt="The oak and the river",
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body=options or {"ignore_eos": True},
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        self.pieces.extend(chunk.choices[0].text for chunk in self._stream)

    def whole(self) -> str:
        """Return the text once it has ended."""
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()
        return "".join(self.pieces)


def test_a_stream_that_was_held_in_the_middle_equals_the_undisturbed_one(served: Node, client: OpenAI) -> None:
    scheduler = served.observe()["scheduler"].pid
    undisturbed = Stream(client).whole()
    stream = Stream(client)
    assert wait_until(lambda: bool(stream.pieces), WITHIN_S) is not None
    status, outcomes = post(served, "/release_memory_occupation", running="hold")
    assert status == 200, outcomes
    held = "out of service: memory released: kv_cache, weights, cuda_graph, requests held"
    assert outcomes == {
        f"main/{MODEL}-0": {"released": ["kv_cache", "weights", "cuda_graph"], "service": held},
    }
    time.sleep(0.3)
    before = len(stream.pieces)
    assert served.get("/ready")[0] == 503
    assert held.encode() in served.get("/ready")[1]
    time.sleep(1.0)
    assert len(stream.pieces) == before, "it stands still"
    status, outcomes = post(served, "/resume_memory_occupation", tags=["weights", "cuda_graph"])
    assert outcomes[f"main/{MODEL}-0"]["released"] == ["kv_cache"]
    status, outcomes = post(served, "/resume_memory_occupation")
    assert outcomes == {f"main/{MODEL}-0": {"released": [], "service": "in service"}}
    assert stream.whole() == undisturbed
    assert served.get("/ready")[0] == 200
    assert served.observe()["scheduler"].pid == scheduler


def test_the_least_length_of_an_answer_counts_what_came_before_it_was_held(served: Node, client: OpenAI) -> None:
    """SGLang began to count anew: an answer of 65 tokens had 107 after it was held at the thirtieth."""
    undisturbed = Stream(client, min_tokens=60).whole()
    stream = Stream(client, min_tokens=60)
    assert wait_until(lambda: len(stream.pieces) > 20, WITHIN_S) is not None
    assert post(served, "/release_memory_occupation", running="hold")[0] == 200
    assert post(served, "/resume_memory_occupation")[0] == 200
    assert stream.whole() == undisturbed


def test_what_would_end_the_scheduler_is_refused(served: Node, client: OpenAI) -> None:
    scheduler = served.observe()["scheduler"].pid
    for path, fields, why in (
        ("/resume_memory_occupation", {}, "no memory is released"),
        ("/release_memory_occupation", {"tags": ["kv"]}, "tags[0]: expected"),
        ("/release_memory_occupation", {"tags": []}, "there is nothing to release without a tag"),
        ("/release_memory_occupation", {"within_s": 0}, "must be above 0 and at most 3600"),
    ):
        status, body = post(served, path, **fields)
        assert (status, why in body["error"]["message"]) == (400, True), body
    assert post(served, "/release_memory_occupation", tags=["weights"])[0] == 200
    for path, fields, why in (
        ("/release_memory_occupation", {}, "weights: released already; resume-memory returns it"),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}, "kv_cache: not released, so it cannot return"),
    ):
        status, body = post(served, path, **fields)
        assert (status, why in body["error"]["message"]) == (400, True), body
    assert post(served, "/resume_memory_occupation")[0] == 200
    assert len(Stream(client).whole()) > 0
    assert served.observe()["scheduler"].pid == scheduler
