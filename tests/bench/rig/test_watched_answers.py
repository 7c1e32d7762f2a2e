"""How an answer ended is told from its text and its end, whatever a server sends."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from threading import Thread

import pytest

from bench.rig.watched_answers import WatchedAnswer, endings, wait_begun, wait_ended

WHOLE = "one two"
WITHIN_S = 60.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def piece(text: str, finish: str | None = None) -> bytes:
    event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


STREAMS = {
    "exact": piece("one ") + piece("two") + piece("", "length") + b"data: [DONE]\n\n",
    "other text": piece("one three", "stop"),
    "cut, looks whole": piece("one ", "stop"),
    "error": piece("one ") + b'data: {"error": {"code": "engine_lost", "message": "it is"}}\n\n',
    "cut": piece("one "),
}


class Server:
    """Answers each connection with the same bytes, and closes it."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._answer = answer
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(self._answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(WITHIN_S)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    serving = Server(request.param)
    yield serving
    serving.close()


def streaming(answer: bytes) -> bytes:
    return HEAD + answer


@pytest.mark.realtime
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("server", "ending"),
    [(streaming(stream), name) for name, stream in STREAMS.items()],
    indirect=["server"],
    ids=STREAMS,
)
def test_the_ending_of_an_answer(server: Server, ending: str) -> None:
    answer = WatchedAnswer(server.port, "x", 2)
    wait_ended([answer], WITHIN_S)
    assert answer.ending(WHOLE) == ending
    assert endings([answer], {"x": WHOLE}) == f"1 {ending}"
    assert answer.next_after(answer.outcome.times[-1]) is None
    assert answer.next_after(answer.outcome.times[0] - 1) == pytest.approx(1)
    assert not wait_begun([answer], 1, WITHIN_S), "it does not go on"
    answer.leave()
