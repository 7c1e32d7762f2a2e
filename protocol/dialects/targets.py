"""The service levels that a request may ask for: how soon its first token should come, and how fast the others.

They are targets, not promises: a router gives the request to the pool of workers that is meant for them. A client
states them in the body of a request, or in headers: many load tools can set headers alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from attrs import field, frozen

from protocol.errors import BadRequest, Unsupported
from protocol.strict.checks import Within
from protocol.strict.mistakes import describe

TARGET_MS_MAX = 3_600_000
TargetMs = Annotated[float, Within(at_least=0, at_most=TARGET_MS_MAX)]

TTFT_FIELD, ITL_FIELD = "ttft_target_ms", "itl_target_ms"
TTFT_HEADERS = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-sgl-ttft-slo-ms")
ITL_HEADERS = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
RATE_HEADER = b"x-sgl-tps-slo"  # tokens a second
HEADERS = (*TTFT_HEADERS, *ITL_HEADERS, RATE_HEADER)

_NUMBER = re.compile(rb"[ \t]*([0-9]{1,9}(?:\.[0-9]{1,9})?)[ \t]*")


@frozen
class Targets:
    """The targets of a request in milliseconds: to the first token, and from one token to the next; None: none.

    Each has the name of the field, or of the header, by which the client stated it.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    ttft_name: str = field(default=TTFT_FIELD, eq=False)
    itl_name: str = field(default=ITL_FIELD, eq=False)

    def or_else(self, other: Targets) -> Targets:
        """Return these, and where there is none that of `other`; 0 is a target."""
        ttft, itl = self if self.ttft_ms is not None else other, self if self.itl_ms is not None else other
        return Targets(ttft.ttft_ms, itl.itl_ms, ttft.ttft_name, itl.itl_name)

    def read_by(self, fields: frozenset[str]) -> Targets:
        """Return the targets that a model reads, by the names of their fields."""
        return Targets(
            self.ttft_ms if TTFT_FIELD in fields else None,
            self.itl_ms if ITL_FIELD in fields else None,
            self.ttft_name,
            self.itl_name,
        )

    def check_read(self, fields: frozenset[str]) -> None:
        """Raise `Unsupported` for a target that a model does not read."""
        read = self.read_by(fields)
        unread = self.ttft_name if self.ttft_ms != read.ttft_ms else self.itl_name
        if self != read:
            raise Unsupported("this model has no grid of pools that reads such a target: leave it out", param=unread)


NO_TARGETS = Targets()


def targets_of(headers: Mapping[bytes, bytes]) -> Targets:
    """Return the targets that the headers of a request state, names in lower case; of several the first listed counts.

    Raises `BadRequest` for a value that is no number in its range, whether or not it counts.
    """
    if not any(name in headers for name in HEADERS):
        return NO_TARGETS
    ttfts = [(_milliseconds(name, headers[name]), name) for name in TTFT_HEADERS if name in headers]
    itls = [(_milliseconds(name, headers[name]), name) for name in ITL_HEADERS if name in headers]
    if RATE_HEADER in headers:
        itls.append((_milliseconds_of_rate(headers[RATE_HEADER]), RATE_HEADER))
    (ttft_ms, ttft_name), (itl_ms, itl_name) = [*ttfts, (None, b"")][0], [*itls, (None, b"")][0]
    return Targets(ttft_ms, itl_ms, ttft_name.decode() or TTFT_FIELD, itl_name.decode() or ITL_FIELD)


def _milliseconds(name: bytes, value: bytes) -> float:
    number = _number(value)
    if number is None or number > TARGET_MS_MAX:
        raise _refused(name, f"a number of milliseconds from 0 to {TARGET_MS_MAX}", value)
    return number


def _milliseconds_of_rate(value: bytes) -> float:
    number = _number(value)
    if not number or 1000 / number > TARGET_MS_MAX:
        raise _refused(RATE_HEADER, f"a number of tokens a second above {1000 / TARGET_MS_MAX:.5f}", value)
    return 1000 / number


def _number(value: bytes) -> float | None:
    match = _NUMBER.fullmatch(value)
    return None if match is None else float(match[1])


def _refused(name: bytes, expected: str, value: bytes) -> BadRequest:
    given = describe(value.decode("latin-1"))
    return BadRequest(f"the header {name.decode()} must be {expected}, got {given}", param=name.decode())


def _parameter(name: bytes) -> dict[str, object]:
    schema = {"type": "number", "exclusiveMinimum" if name == RATE_HEADER else "minimum": 0}
    what = "the first token" if name in TTFT_HEADERS else "the time between two tokens"
    unit = "tokens a second" if name == RATE_HEADER else "milliseconds"
    text = f"The target of {what} in {unit}; a field of the body counts before it."
    return {"name": name.decode(), "in": "header", "schema": schema, "description": text}


PARAMETERS = tuple(map(_parameter, HEADERS))
"""The headers as the OpenAPI document describes them."""
