"""The reading of an operator's TOML file, with the same sentences of refusal for every such file.

Only text refused by the parser is "not TOML". Errors in the use of its values are explained elsewhere.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from protocol.errors import StartFailed
from supervisor.files import reading

LINE = re.compile(r"\(at line (\d+), column \d+\)$")
# A header with a name without quotes, perhaps with a table of that name's section.
HEADER = re.compile(r"\s*\[\s*([A-Za-z_-]+)\s*\.\s*([^\"'\[\]]+?)(\.[a-z_]+)?\s*\]\s*(?:#.*)?")
WORD = re.compile(r"\s*([\w.\"-]+)\s*=\s*([A-Za-z~/.][^\"'\[\]{}#=,]*?)\s*(?:#.*)?")  # key = text without quotes


def read_text(path: Path, bytes_max: int) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark; raises `StartFailed`."""
    try:
        return reading.read(path, bytes_max).decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise StartFailed(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StartFailed(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:  # a path with a NUL
        raise StartFailed(f"{path} cannot be read: {error}") from error


def parse(path: Path, text: str) -> dict[str, object]:
    """Return the values in the text of a file; raises `StartFailed` if it is not TOML."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # `TOMLDecodeError` is one, and so is Python's for a number of too many digits
        raise StartFailed(f"{path} is not TOML: {error}{_advice(str(error), text)}") from error
    except RecursionError as error:
        raise StartFailed(f"{path} is not TOML: it nests too deeply") from error


def _advice(error: str, text: str) -> str:
    """Return how to write the line of an error, if it has a name or a text without quotes; else nothing.

    The text itself is not repeated: it may be a secret.
    """
    if (at := LINE.search(error)) is None:
        return ""
    line = text.split("\n")[int(at[1]) - 1]
    if (header := HEADER.fullmatch(line)) is not None:
        table, name, inner = header.groups(default="")
        return f'; a name with such characters needs quotes: [{table}."{name}"{inner}]'
    if (word := WORD.fullmatch(line)) is not None:
        key, value = word.groups()
        if value.lower() in {"true", "false"}:
            return f"; write {key} = {value.lower()}"
        return f'; a text needs quotes: {key} = "..."'
    return ""
