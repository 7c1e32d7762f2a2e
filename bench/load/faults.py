"""The failure of a request as an exception, and names for errors of the operating system."""

from __future__ import annotations

import errno
import socket

from bench.load.messages import Fault, Kind

CODE_LENGTH_MAX = 80
DETAIL_LENGTH_MAX = 300


class RequestFailed(Exception):
    """One request has failed; its record gets the fault."""

    def __init__(self, kind: Kind, code: object, detail: object = "") -> None:
        super().__init__(f"{kind}: {code}: {detail}")
        self.fault = Fault(kind, _text(code, CODE_LENGTH_MAX), _text(detail, DETAIL_LENGTH_MAX))


def os_error_fault(error: BaseException, *, begun: bool) -> RequestFailed:
    """Return the failure that an error of a socket means: an answer that has `begun` is truncated."""
    return RequestFailed("truncated" if begun else "connection", name(error), error)


def name(error: BaseException) -> str:
    """Return a short name for an error of a socket: that of its first cause."""
    if isinstance(error, BaseExceptionGroup):
        return name(error.exceptions[0])
    if error.__cause__ is not None:
        return name(error.__cause__)
    if isinstance(error, socket.gaierror):
        return "no such host"
    number = getattr(error, "errno", None)
    return errno.errorcode.get(number, type(error).__name__) if isinstance(number, int) else type(error).__name__


def _text(value: object, length_max: int) -> str:
    text = str(value)
    return text if len(text) <= length_max else text[: length_max - 1] + "…"
