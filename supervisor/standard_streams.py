"""The standard streams of a process, made such that no output of a command fails for where it goes.

A stream that was closed is opened at `/dev/null`: else the next file or socket would take its place, and its output.
A character that the encoding of a terminal lacks is written in ASCII.
"""

from __future__ import annotations

import codecs
import os
import sys
from io import TextIOWrapper

HANDLER = "espalier.ascii"
ASCII = {"│": "|", "├": "|", "└": "`", "─": "-", "┬": "-", "·": "-", "…": "...", "\N{NO-BREAK SPACE}": " "}


def prepare() -> None:
    """Open closed streams, and write characters without a code in ASCII."""
    codecs.register_error(HANDLER, in_ascii)
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            _open_nowhere(fd, name, mode)
        stream = getattr(sys, name)
        if mode == "w" and isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def _open_nowhere(fd: int, name: str, mode: str) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)
    os.set_inheritable(fd, True)
    setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # it is open to the end


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return characters that cannot be encoded in ASCII, escaped if nothing looks like them, as a handler of errors."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(ASCII.get(char) or char.encode("ascii", "backslashreplace").decode() for char in text), error.end
