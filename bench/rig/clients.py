"""Clients that record an answer, its times and how it ended. Each has one connection of its own."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from bench.rig.node import MODEL, wait_until

TIMEOUT_S = 60.0


def chat_body(prompt: str, tokens_max: int | None = None, **options: Any) -> dict[str, Any]:
    """Return a chat request with a deterministic answer, of exactly `tokens_max` tokens if given."""
    exact = {} if tokens_max is None else {"max_tokens": tokens_max, "ignore_eos": True}
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "stream": True, **exact, **options}


def response_body(prompt: str, tokens_max: int | None = None, **options: Any) -> dict[str, Any]:
    """Return the same request as a `response.create`."""
    exact = {} if tokens_max is None else {"max_output_tokens": tokens_max, "ignore_eos": True}
    return {"type": "response.create", "model": MODEL, "input": prompt, "temperature": 0, **exact, **options}


def headers(key: str = "") -> dict[str, str]:
    """Return the headers of a request with a key, if it has one."""
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})


def write_keys(folder: Path, secrets: Mapping[str, str]) -> Path:
    """Write the secrets, by the names of their keys, into a key file in a folder; return its path."""
    path = folder / "keys.toml"
    hashes = {name: hashlib.sha256(secret.encode()).hexdigest() for name, secret in secrets.items()}
    path.write_text("".join(f'[key.{name}]\nsha256 = "{digest}"\n' for name, digest in hashes.items()))
    path.chmod(0o600)
    return path


@dataclass
class Outcome:
    """The answer to one request so far: its text, its end, its times."""

    text: str = ""
    finish: str | None = None  # a finish reason, if the answer claims to be whole
    error: dict[str, Any] | None = None  # the error object of the answer
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    times: list[float] = field(default_factory=list)  # when each piece of text came
    ended_at: float = 0.0
    close_code: int | None = None  # of a WebSocket that closed
    refusals: list[dict[str, Any]] = field(default_factory=list)  # events of other requests that were refused meanwhile

    @property
    def pieces(self) -> int:
        """The number of pieces of text."""
        return len(self.times)

    @property
    def first_at(self) -> float | None:
        """When the first piece of text came."""
        return self.times[0] if self.times else None

    @property
    def whole(self) -> bool:
        """Whether the answer claims to be complete."""
        return self.finish in {"stop", "length"} and self.error is None


class Chat:
    """One chat completion over a connection of its own."""

    def __init__(self, port: int, body: dict[str, Any], key: str = "") -> None:
        self.outcome = Outcome()
        self.connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self.connection.connect()
        self._response: HTTPResponse | None = None
        self._socket = self.connection.sock  # http.client drops it with an answer that ends the connection
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), headers(key))

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream as they come; `outcome` has its end."""
        try:
            answer = self._answer()
            if answer.status != 200:
                body = json.loads(answer.read())
                self.outcome.error = body.get("error", body)  # not every server puts it below `error`
                return
            while line := answer.readline():
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self._count(event)
                    yield event
                elif line.startswith(b"data: [DONE]"):
                    return
        except (OSError, HTTPException, ValueError, AttributeError) as error:  # as http.client does for a cut chunk
            self.outcome.error = self.outcome.error or {"code": "connection", "message": repr(error)}
        finally:
            self.outcome.ended_at = time.perf_counter()

    def read(self) -> Outcome:
        """Read to the end, streaming or not."""
        for _ in self.events():
            pass
        self.close()
        return self.outcome

    def read_body(self) -> dict[str, Any]:
        """Return the body of an answer in one piece; empty on an error, which `outcome` has."""
        body: dict[str, Any] = {}
        try:
            answer = self._answer()
            body = json.loads(answer.read())
            self.outcome.error = body.get("error", None if answer.status == 200 else body)
        except (OSError, HTTPException, ValueError, AttributeError) as error:  # likewise for a cut body
            self.outcome.error = {"code": "connection", "message": repr(error)}
        finally:
            self.outcome.ended_at = time.perf_counter()
            self.close()
        return {} if self.outcome.error else body

    def close(self) -> None:
        """Disconnect and close the socket; no thread may be reading it."""
        if self._response is not None:  # it keeps the socket open
            self._response.close()
        self.connection.close()
        self._socket.close()

    def leave(self) -> None:
        """Disconnect at once; a thread that reads gets the connection's end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Close the connection by a reset; no thread may be reading it."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def half_close(self) -> None:
        """Send the end of this direction alone; the other stays open until `close`."""
        self._socket.shutdown(socket.SHUT_WR)

    def _answer(self) -> HTTPResponse:
        self._response = answer = self.connection.getresponse()
        self.outcome.status = answer.status
        self.outcome.headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer

    def _count(self, event: dict[str, Any]) -> None:
        outcome = self.outcome
        outcome.error = event.get("error", outcome.error)
        outcome.usage = event.get("usage") or outcome.usage
        for choice in event.get("choices", ()):
            outcome.finish = choice["finish_reason"] or outcome.finish
            if text := choice["delta"].get("content"):
                outcome.times.append(time.perf_counter())
                outcome.text += text


class ResponsesSocket:
    """One WebSocket to `/v1/responses`."""

    def __init__(self, port: int) -> None:
        url = f"ws://127.0.0.1:{port}/v1/responses"
        self._open = ExitStack()
        self.connection: ClientConnection = self._open.enter_context(
            connect(url, open_timeout=TIMEOUT_S, close_timeout=1.0, max_size=None, proxy=None)
        )

    def send(self, body: dict[str, Any]) -> None:
        """Send one message."""
        self.connection.send(json.dumps(body))

    def events(self, outcome: Outcome) -> Iterator[dict[str, Any]]:
        """Yield the events of one answer as they come, and record its end in `outcome`."""
        try:
            while True:
                event = json.loads(self.connection.recv(TIMEOUT_S))
                last = _count_event(outcome, event)
                yield event
                if last:
                    return
        except ConnectionClosed as closed:
            outcome.close_code = closed.rcvd.code if closed.rcvd else 1006
            outcome.error = outcome.error or {"code": "connection", "message": str(closed)}
        finally:
            outcome.ended_at = time.perf_counter()

    def read(self, outcome: Outcome | None = None) -> Outcome:
        """Read one answer to its end, into `outcome` if it is given."""
        outcome = Outcome() if outcome is None else outcome
        for _ in self.events(outcome):
            pass
        return outcome

    def close_code(self, within_s: float = TIMEOUT_S) -> int | None:
        """Wait for the server's close frame; return its code, None after `within_s`."""
        try:
            while True:
                self.connection.recv(within_s)
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else 1006
        except TimeoutError:
            return None

    def close(self) -> None:
        """Close the WebSocket."""
        self._open.close()

    def leave(self) -> None:
        """Disconnect at once, without a close frame."""
        with suppress(OSError):
            self.connection.socket.shutdown(socket.SHUT_RDWR)


def _count_event(outcome: Outcome, event: dict[str, Any]) -> bool:
    """Record one event of an answer; return whether it was the last."""
    match event["type"]:
        case "response.output_text.delta":
            outcome.times.append(time.perf_counter())
            outcome.text += event["delta"]
        case "response.completed" | "response.incomplete":
            reason = (event["response"].get("incomplete_details") or {}).get("reason")
            outcome.finish = {None: "stop", "max_output_tokens": "length"}.get(reason, reason)
            outcome.usage = event["response"]["usage"]
            return True
        case "response.failed":
            outcome.error = event["response"]["error"]
            return True
        case "error" if outcome.first_at is not None:  # an answer that has begun ends in `response.failed`
            outcome.refusals.append(event)
        case "error":
            outcome.error, outcome.status = event["error"], event.get("status", 0)
            return True
    return False


class BackgroundReader:
    """Reads an answer in a thread of its own."""

    def __init__(self, read: Callable[[], Outcome]) -> None:
        self._read = read
        self.outcome: Outcome | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.outcome = self._read()

    def wait(self, within_s: float = TIMEOUT_S) -> Outcome:
        """Wait for the end of the answer."""
        self._thread.join(within_s)
        assert self.outcome is not None, f"no end within {within_s} s"
        return self.outcome


def read_or_disconnect(
    read: Callable[[], object],
    outcome: Outcome,
    leave: Callable[[], None],
    leave_after_s: float | None,
    within_s: float,
) -> Outcome:
    """Read an answer to its end, or disconnect after `leave_after_s` and wait up to `within_s` for its reader."""

    def read_all() -> Outcome:
        read()
        return outcome

    if leave_after_s is None:
        return read_all()
    reader = BackgroundReader(read_all)
    wait_until(lambda: reader.outcome is not None, leave_after_s, every_s=0.01)
    leave()
    return reader.wait(within_s)
