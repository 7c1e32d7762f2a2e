"""W3C Trace Context of a request: read from HTTP headers, carried in messages, and passed on.

New ids are arguments, 32 random hexadecimal digits each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import frozen

STATE_CHARACTERS_MAX = 512
MEMBER_CHARACTERS_MAX = 128  # longer members of `tracestate` are dropped first if it is too long
SAMPLED = 0b1
UNSAMPLED = {"traceparent": f"00-{1:032x}-{1:016x}-00"}
"""The headers for a system that would begin a sampled trace without any."""

_PARENT = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?P<id>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_IDS = re.compile(r"(?!0{32})[0-9a-f]{32}(-(?!0{16})[0-9a-f]{16}){2}")
_MEMBER = r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
_STATE = re.compile(f"({_MEMBER}(,{_MEMBER}){{0,31}})?")


@frozen
class Trace:
    """One span of a trace; raises `ValueError` if it is invalid, also on its arrival over a link.

    `parent` is the span that caused this one, None where the trace begins. `state` is data of other tracing systems,
    which is passed on.
    """

    id: str
    span: str
    parent: str | None = None
    sampled: bool = True  # False: the caller records no spans of this trace
    state: str = ""

    def __attrs_post_init__(self) -> None:
        if _IDS.fullmatch(f"{self.id}-{self.span}-{self.span if self.parent is None else self.parent}") is None:
            raise ValueError("the ids of a trace are invalid")
        if len(self.state) > STATE_CHARACTERS_MAX or _STATE.fullmatch(self.state) is None:
            raise ValueError("the state of a trace is invalid")

    @property
    def followed(self) -> bool:
        """Whether a client records spans of this trace, so that the part of every worker is logged too."""
        return self.sampled and self.parent is not None


def child_span(before: Trace | None, drawn: str) -> Trace:
    """Return the next span after another one, or the first one of a new trace."""
    if before is None:
        return Trace(drawn, drawn[16:])
    return Trace(before.id, drawn[16:], before.span, before.sampled, before.state)


def from_headers(headers: Sequence[tuple[bytes, bytes]]) -> Trace | None:
    """Return the sender's span from the headers of an HTTP request, None if they have no valid one.

    The names of headers are in lower case. A header of a later version is read as far as all versions agree.
    """
    parents = [value for name, value in headers if name == b"traceparent"]
    parent = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if parent is None or (parent["version"] == b"00" and parent["more"] is not None):
        return None
    state = _state(value.decode("latin-1") for name, value in headers if name == b"tracestate")
    sampled = bool(int(parent["flags"], 16) & SAMPLED)
    try:
        return Trace(parent["id"].decode(), parent["span"].decode(), sampled=sampled, state=state)
    except ValueError:  # an id of zeros
        return None


def as_headers(trace: Trace) -> dict[str, str]:
    """Return the HTTP headers that propagate a span to another system."""
    headers = {"traceparent": f"00-{trace.id}-{trace.span}-{trace.sampled:02x}"}
    return {**headers, "tracestate": trace.state} if trace.state else headers


def log_fields(trace: Trace | None) -> dict[str, str]:
    """Return the log fields of a span, by which log lines are matched with traces."""
    if trace is None:
        return {}
    named = {"trace": trace.id, "span": trace.span}
    return named if trace.parent is None else {**named, "parent": trace.parent}


def _state(values: Iterable[str]) -> str:
    """Return the `tracestate` headers as one, shortened to the limit; empty if they are invalid."""
    members = [stripped for value in values for member in value.split(",") if (stripped := member.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    if len(keys) < len(members) or _STATE.fullmatch(",".join(members)) is None:
        return ""
    if len(",".join(members)) > STATE_CHARACTERS_MAX:
        members = [member for member in members if len(member) <= MEMBER_CHARACTERS_MAX]
    while len(",".join(members)) > STATE_CHARACTERS_MAX:
        members.pop()
    return ",".join(members)
