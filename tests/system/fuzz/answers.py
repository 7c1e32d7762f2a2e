"""A strict parser of a server's responses, which names what is wrong with them."""

from __future__ import annotations

import json
import re
from typing import Any

from attrs import frozen

from protocol.errors import ERRORS_BY_CODE, InternalError
from supervisor.gateway.open_streams import COMMENT

LISTS = {b"connection"}  # RFC 9110, 5.3: what is a list may stand on several lines
# 500 is for `answer_invalid` alone: the code of a bug is refused wherever it stands.
STATUSES = {100, 101, 200, 204, 400, 401, 403, 404, 405, 408, 413, 415, 426, 429, 431, 500, 501, 503, 505}
CLOSE_CODES = {1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1012, 1013, *range(3000, 5000)}
MESSAGE_CHARACTERS_MAX = 4096  # of an error: nobody is sent back the megabyte that was wrong
START = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [ -~]*")
HEADER = re.compile(rb"([A-Za-z0-9-]+): ([\t -~]*)")
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


class Wrong(Exception):
    """The server sent something that it must not send."""


class Unfinished(Exception):
    """The response is not complete yet."""


@frozen
class Answer:
    """One HTTP answer."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    whole: bool = True

    @property
    def json(self) -> object:
        return read(self.body)


def read(data: bytes) -> object:
    """Return strict JSON: no NaN, no half pairs, no key twice."""
    try:
        return json.loads(data.decode(), parse_constant=_no, object_pairs_hook=_once)
    except ValueError as error:
        raise Wrong(f"no JSON: {error}: {data[:200]!r}") from None


def _no(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(fields := dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")
    return fields


# HTTP -------------------------------------------------------------------------------------


def take(data: bytes, *, ended: bool, bodiless: bool = False) -> tuple[Answer, bytes]:  # noqa: C901  # one rule each
    """Return the first answer and what follows it; `bodiless` if some requests may have been a HEAD.

    Raises `Unfinished` if there is more to come, and `Wrong` for everything that is no answer.
    """
    top, blank, rest = data.partition(b"\r\n\r\n")
    if not blank:
        if ended or len(data) > 65_536:
            raise Wrong(f"half a head: {data[:200]!r}")
        raise Unfinished
    start, *lines = top.split(b"\r\n")
    status = _status(start)
    headers = _headers(lines)
    if status in {100, 101, 204}:
        if status == 204 and (b"content-length" in headers or b"transfer-encoding" in headers):
            raise Wrong("a 204 has no body")
        return Answer(status, headers, b""), rest
    for name in (b"x-request-id", b"date", b"content-type"):
        if name not in headers:
            raise Wrong(f"no {name.decode()}: {top!r}")
    if bodiless and (not rest or rest.startswith(b"HTTP/1.1 ")):
        return Answer(status, headers, b"", whole=False), rest
    if (lengths := (b"content-length" in headers) + (b"transfer-encoding" in headers)) > 1 or (
        not lengths and not ended
    ):
        raise Wrong(f"the body has no length, or two: {top!r}")
    if b"content-length" in headers:
        body, rest = _counted(int(headers[b"content-length"]), rest, ended=ended)
        answer = Answer(status, headers, body)
    elif b"transfer-encoding" in headers:
        answer, rest = _dechunked(status, headers, rest, ended=ended)
    else:
        answer, rest = Answer(status, headers, rest), b""
    _check(answer)
    return answer, rest


def _status(start: bytes) -> int:
    if not (match := START.fullmatch(start)):
        raise Wrong(f"no status line: {start[:200]!r}")
    if (status := int(match[1])) not in STATUSES:
        raise Wrong(f"status {status}")
    return status


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for line in lines:
        if not (match := HEADER.fullmatch(line)):
            raise Wrong(f"no header: {line[:200]!r}")
        name, value = match[1].lower(), match[2]
        if name in headers and name not in LISTS:
            raise Wrong(f"a header stands twice: {line[:200]!r}")
        headers[name] = b", ".join(filter(None, (headers.get(name), value)))
    return headers


def _counted(size: int, rest: bytes, *, ended: bool) -> tuple[bytes, bytes]:
    if len(rest) < size:
        if ended:
            raise Wrong("the body ends early")
        raise Unfinished
    return rest[:size], rest[size:]


def _dechunked(status: int, headers: dict[bytes, bytes], rest: bytes, *, ended: bool) -> tuple[Answer, bytes]:
    body = b""
    while True:
        line, end, after = rest.partition(b"\r\n")
        if not end:
            break
        if not re.fullmatch(rb"[0-9a-f]{1,8}", line):
            raise Wrong(f"no chunk size: {line[:200]!r}")
        size = int(line, 16)
        if len(after) < size + 2:
            break
        if after[size : size + 2] != b"\r\n":
            raise Wrong("a chunk is not as long as it says")
        body, rest = body + after[:size], after[size + 2 :]
        if size == 0:
            return Answer(status, headers, body), rest
    if not ended:
        raise Unfinished
    return Answer(status, headers, body, whole=False), b""


def _check(answer: Answer) -> None:
    kind = answer.headers[b"content-type"]
    if answer.status >= 400:
        if kind != b"application/json":
            raise Wrong(f"an error of type {kind!r}")
        body = answer.json
        check_error(body.get("error") if isinstance(body, dict) else None)
        if answer.status == 405 and b"allow" not in answer.headers:
            raise Wrong("405 without allow")
    elif kind == b"application/json":
        if not isinstance(answer.json, dict):
            raise Wrong(f"no object: {answer.body[:200]!r}")
    elif kind.startswith(b"text/event-stream"):
        check_events(answer)


def check_error(error: object) -> None:
    if not isinstance(error, dict) or error.keys() < {"message", "type", "param", "code"}:
        raise Wrong(f"no error object: {error!r:.300}")
    if error["code"] not in ERRORS_BY_CODE or error["code"] == InternalError.code:
        raise Wrong(f"error {error['code']!r}: {error['message']!r:.200}")
    if not 0 < len(error["message"]) <= MESSAGE_CHARACTERS_MAX:
        raise Wrong(f"an error of {len(error['message'])} characters: {error['message']!r:.200}")


def check_events(answer: Answer) -> None:
    *events, rest = answer.body.split(b"\n\n")
    if rest:
        raise Wrong(f"half an event: {rest[:200]!r}")
    for event in events:
        if event == COMMENT.rstrip():
            continue
        lines = event.split(b"\n")
        if not lines[-1].startswith(b"data: ") or not all(line.startswith(b"event: ") for line in lines[:-1]):
            raise Wrong(f"no event: {event[:200]!r}")
        if lines[-1] != b"data: [DONE]":
            payload = read(lines[-1].removeprefix(b"data: "))
            if isinstance(payload, dict) and "choices" not in payload and isinstance(payload.get("error"), dict):
                check_error(payload["error"])
            if isinstance(payload, dict) and "sequence_number" in payload:
                check_event(payload)


# WebSocket --------------------------------------------------------------------------------


def frames(data: bytes, *, ended: bool) -> tuple[list[dict[str, object]], int | None, bytes]:  # noqa: C901  # as above
    """Return the events, the close code if one came, and half a frame if that came last."""
    events: list[dict[str, object]] = []
    code: int | None = None
    while len(data) >= 2:
        if code is not None:
            raise Wrong(f"something follows the close frame: {data[:200]!r}")
        size, at = data[1], 2
        if size >= 126:
            at = 4 if size == 126 else 10
            size = int.from_bytes(data[2:at])
        if size > 16 * 1024 * 1024 or data[1] & 0x80:
            raise Wrong(f"a masked or monstrous frame: {data[:14]!r}")
        if len(data) < at + size:
            break
        first, payload, data = data[0], data[at : at + size], data[at + size :]
        if first & 0xF0 != 0x80:
            raise Wrong(f"a frame that is no whole one: {first:#x}")
        match first & 15:
            case 1:
                events.append(_event(payload))
            case 8:
                code = _close(payload)
            case 9 | 10 if size < 126:
                pass
            case opcode:
                raise Wrong(f"opcode {opcode}, {size} bytes")
    if ended and data:
        raise Wrong(f"half a frame: {data[:200]!r}")
    return events, code, data


def _event(payload: bytes) -> dict[str, object]:
    event = read(payload)
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise Wrong(f"no event: {payload[:200]!r}")
    check_event(event)
    return event


def check_event(event: dict[str, Any]) -> None:
    if event["type"] == "error":
        check_error(event.get("error"))
        if event.get("status") not in STATUSES:
            raise Wrong(f"an error event of status {event.get('status')!r}")
    if event["type"] == "response.failed" and (why := event["response"]["error"])["cause"] == InternalError.code:
        raise Wrong(f"a response failed: {why!r}")


def _close(payload: bytes) -> int:
    if not payload:
        return 1005
    code = int.from_bytes(payload[:2])
    if len(payload) < 2 or code not in CLOSE_CODES:
        raise Wrong(f"close code {code}: {payload[2:]!r}")
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        raise Wrong(f"a close reason that is no text: {payload!r}") from None
    return code
