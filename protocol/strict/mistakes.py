"""Mistakes in a document, each with its path and a sentence about it."""

from __future__ import annotations

import json
import re

from attrs import frozen

from protocol.errors import EspalierError

_BARE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@frozen
class Mistake:
    """One thing that is wrong: the path of its key, and a sentence about it."""

    path: str
    message: str
    unsupported: bool = False  # legal elsewhere, but not implemented by this server
    unnamed: tuple[str, ...] = ()  # keys below `path` that the sentence counts without naming them

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class Mistakes(EspalierError):
    """All mistakes in one document."""

    def __init__(self, mistakes: tuple[Mistake, ...]) -> None:
        super().__init__("; ".join(map(str, mistakes)))
        self.mistakes = mistakes


def wrong(message: str, path: str = "", *, unsupported: bool = False) -> Mistakes:
    """Return an error with one mistake, to be raised."""
    return Mistakes((Mistake(path, message, unsupported),))


def join(path: str, rest: str) -> str:
    """Return the path of `rest` below `path`."""
    return f"{path}.{rest}" if path and rest and not rest.startswith("[") else path + rest


def segment(key: str) -> str:
    """Return a key as a segment of a path: bare if it is a plain word, else quoted and shortened."""
    return key if _BARE.fullmatch(key) else f"[{describe(key)}]"


def describe(value: object) -> str:
    """Return a few words for a value of a document, at most a line."""
    match value:
        case None | bool():
            text = json.dumps(value)
        case int():
            text = str(value) if abs(value) < 10**18 else "a huge integer"
        case float():
            text = repr(value)
        case str():
            short = value if len(value) <= 40 else value[:39] + "…"
            text = json.dumps(short, ensure_ascii=False).encode("utf-8", "replace").decode()
        case list():
            text = "a list"
        case dict():
            text = "an object"
        case _:
            text = f"a {type(value).__name__}"
    return text
