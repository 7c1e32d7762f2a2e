"""The service levels that a request may ask for: how soon its first token should come, and how fast the others.

They are targets, not promises: a router gives the request to the pool of workers that is meant for them. A client
states them in the body of a request, or in headers: many load tools can set headers alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from attrs import frozen

from protocol.errors import BadRequest
from protocol.strict.checks import Within
from protocol.strict.mistakes import describe

TARGET_MS_MAX = 3_600_000
TargetMs = Annotated[float, Within(at_least=0, at_most=TARGET_MS_MAX)]

TTFT_HEADERS = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-sgl-ttft-slo-ms")
ITL_HEADERS = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
RATE_HEADER = b"x-sgl-tps-slo"  # tokens a second
HEADERS = (*TTFT_HEADERS, *ITL_HEADERS, RATE_HEADER)

_NUMBER = re.compile(rb"[ \t]*([0-9]{1,9}(?:\.[0-9]{1,9})?)[ \t]*")


@frozen
class Targets:
    """The targets of a request in milliseconds: to the first token, and from one token to the next; None: none."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def or_else(self, other: Targets) -> Targets:
        """Return these, and where there is none that of `other`; 0 is a target."""
        return Targets(
            other.ttft_ms if self.ttft_ms is None else self.ttft_ms,
            other.itl_ms if self.itl_ms is None else self.itl_ms,
        )


NO_TARGETS = Targets()


def targets_of(headers: Mapping[bytes, bytes]) -> Targets:
    """Return the targets that the headers of a request state, names in lower case; of several the first listed counts.

    Raises `BadRequest` for a value that is no number in its range, whether or not it counts.
    """
    if not any(name in headers for name in HEADERS):
        return NO_TARGETS
    ttfts = [_milliseconds(name, headers[name]) for name in TTFT_HEADERS if name in headers]
    itls = [_milliseconds(name, headers[name]) for name in ITL_HEADERS if name in headers]
    if RATE_HEADER in headers:
        itls.append(_milliseconds_of_rate(headers[RATE_HEADER]))
    return Targets(ttfts[0] if ttfts else None, itls[0] if itls else None)


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
