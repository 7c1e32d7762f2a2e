"""Reading the body of a request: from JSON to the class of the request, and from its mistakes to one error.

A body is untrusted, and decoding it runs in the event loop: its time is bounded before it begins, by the number of
containers that a linear scan counts. `reading_work` estimates that time for the caller, who decides where to read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from protocol.errors import BadRequest, RequestError, Unsupported
from protocol.strict.mistakes import Mistake, Mistakes
from protocol.strict.structure import structure

T = TypeVar("T")

LISTED_MAX = 8  # mistakes in one error
CONTAINERS_MAX = 32_768
"""The most lists, objects and keys of one body: each costs microseconds of the event loop."""

BYTES_A_CHARACTER = 32  # bytes that are decoded in the time in which one character is tokenised
CHARACTERS_A_CONTAINER = 3  # characters that are tokenised in the time in which one container is decoded

CONTAINERS = b"[{:"  # the bytes that begin one, outside strings
WINDOW_BYTES = 64 * 1024
COUNTED_MAX = 64 * 1024  # bytes or characters of a body, whose containers are counted before it is read

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def has_more_containers(raw: bytes, most: int) -> bool:
    """Return whether JSON has more lists, objects and keys than this; invalid JSON is counted up to its first mistake.

    A window at a time, since each call keeps all other threads from running while it lasts.
    """
    count, in_string, start = 0, 0, 0
    while start < len(raw) and count <= most:
        window = raw[start : start + WINDOW_BYTES].replace(rb"\\", b"")  # an escaped backslash escapes nothing
        start += WINDOW_BYTES + window.endswith(b"\\")  # no window begins with what the last one escapes
        pieces = window.replace(rb"\"", b"").split(b'"')
        outside = b"".join(pieces[in_string::2])
        count += _containers(outside)
        in_string ^= (len(pieces) - 1) % 2
    return count > most


def decode(text: bytes | str) -> dict[str, object]:
    """Return the JSON object that `text` holds; of a repeated key the last value counts, as is usual.

    Raises `BadRequest` for invalid JSON, for anything but an object, and for too many containers.
    """
    try:
        raw = text.encode() if isinstance(text, str) else text
        if _containers(raw) > CONTAINERS_MAX and has_more_containers(raw, CONTAINERS_MAX):
            raise BadRequest(f"the JSON holds more than {CONTAINERS_MAX} lists, objects and keys")
        data: object = msgspec.json.decode(raw)
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply") from None
    except UnicodeError:
        raise BadRequest("the JSON is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        hint = " (is a \\u escape half of a surrogate pair?)" if _SURROGATE.search(raw) else ""
        raise BadRequest(f"this is not JSON that can be read: {error}{hint}") from None
    if not isinstance(data, dict):
        raise BadRequest("expected a JSON object")
    return data


def reading_work(text: bytes | str) -> int:
    """Return the time that a body takes to read, in characters to tokenise, by its length and its containers.

    Of a long body the beginning is counted and the rest estimated, since who asks is still in the event loop.
    """
    head = text[:COUNTED_MAX]
    raw = head.encode() if isinstance(head, str) else head
    work = len(raw) // BYTES_A_CHARACTER + CHARACTERS_A_CONTAINER * _containers(raw)
    return work * len(text) // max(1, len(head))


def _containers(raw: bytes) -> int:
    """Return how many bytes may begin a container, in one pass: three counts take half as long again."""
    return len(raw) - len(raw.translate(None, CONTAINERS))


def read(data: object, cls: type[T]) -> T:
    """Return `data` as a `cls`; raises one `RequestError` that lists every mistake in it."""
    try:
        return structure(data, cls)
    except Mistakes as error:
        raise as_request_error(error.mistakes) from None


def as_request_error(mistakes: Sequence[Mistake]) -> RequestError:
    """Return one error that lists the mistakes; its `param` is the path of the first."""
    sentences = [str(mistake) for mistake in mistakes[:LISTED_MAX]]
    if len(mistakes) > LISTED_MAX:
        sentences.append(f"and {len(mistakes) - LISTED_MAX} more")
    kind = Unsupported if all(mistake.unsupported for mistake in mistakes) else BadRequest
    return kind("; ".join(sentences), param=mistakes[0].path or None)
