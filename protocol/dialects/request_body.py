"""From the text of a client's request to its class, and from its mistakes to one error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from protocol.errors import BadRequest, RequestError, Unsupported
from protocol.strict.mistakes import Mistake, Mistakes
from protocol.strict.structure import structure


class Checking(Protocol):
    """A class whose fields can be right one by one, and wrong beside each other."""

    def mistakes(self) -> Iterable[Mistake]:
        """Return what is wrong between fields that are each right."""


T = TypeVar("T")
C = TypeVar("C", bound=Checking)

LISTED_MAX = 8  # mistakes in one sentence
CONTAINERS_MAX = 32_768
"""The most lists, objects and keys of one body: each costs microseconds, in which nobody else is served."""

BYTES_A_CHARACTER = 32  # that are read in the time in which a character is tokenised
CHARACTERS_A_CONTAINER = 3

# Nothing here is ever tried a second way, and a string without its end goes on to the end of the text: linear time.
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+'
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def pattern_of_excess(containers: int) -> re.Pattern[bytes]:
    """Return what matches JSON that has more lists, objects and keys than this; it looks no further than it must."""
    one = rb'[^"\[{:]*+(?:%b[^"\[{:]*+)*+[\[{:]' % STRING
    return re.compile(rb"(?:%b){%d}" % (one, containers + 1), re.DOTALL)


_TOO_MANY = pattern_of_excess(CONTAINERS_MAX)


def decode(text: bytes | str) -> dict[str, object]:
    """Return the JSON object that `text` holds; of a key that stands twice the last one counts, as everywhere.

    Raises `BadRequest` for what is no JSON, no object, or made of too many parts.
    """
    try:
        raw = text.encode() if isinstance(text, str) else text
        if sum(map(raw.count, (b"[", b"{", b":"))) > CONTAINERS_MAX and _TOO_MANY.match(raw):
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
    """Return how long a body takes to read, in characters to tokenise: by its length, and by what it is made of."""
    raw = text.encode() if isinstance(text, str) else text
    return len(raw) // BYTES_A_CHARACTER + CHARACTERS_A_CONTAINER * sum(map(raw.count, (b"[", b"{", b":")))


def read(data: object, cls: type[T]) -> T:
    """Return `data` as a `cls`, or raise one error that lists every mistake in it."""
    try:
        return structure(data, cls)
    except Mistakes as error:
        raise as_request_error(error.mistakes) from None


def read_checked(data: object, cls: type[C]) -> C:
    """Return `data` as a `cls` that finds no mistakes in itself, or raise one error that lists them all."""
    result = read(data, cls)
    if mistakes := tuple(result.mistakes()):
        raise as_request_error(mistakes)
    return result


def as_request_error(mistakes: Sequence[Mistake]) -> RequestError:
    """Return the error that says all of these; its `param` is the first that is at fault."""
    said = [str(mistake) for mistake in mistakes[:LISTED_MAX]]
    if len(mistakes) > LISTED_MAX:
        said.append(f"and {len(mistakes) - LISTED_MAX} more")
    kind = Unsupported if all(mistake.unsupported for mistake in mistakes) else BadRequest
    return kind("; ".join(said), param=mistakes[0].path or None)
