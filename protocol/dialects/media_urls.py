"""The URLs by which clients name images and videos, and their checks without network and files.

Everything that a client may name is a URL, so the fetching side has one place to decide on it. A data URL has
megabytes, and only its beginning is looked at here. A URL that passes is as hostile as before: hosts, roots, sizes and
the content are checked where it is fetched.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self
from urllib.parse import SplitResult, unquote, urlsplit

from attrs import frozen

from protocol.strict.mistakes import describe, wrong

SCHEMES = ("data", "https", "http", "file")
URL_CHARACTERS_MAX = 8192  # of a URL that is fetched; the length of a data URL is bounded by that of its body
DATA_HEAD_CHARACTERS_MAX = 256  # of a data URL, before its data
EMBEDDINGS_HEAD = "data:application/octet-stream;base64,"
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".npy", ".npz")
SAFETENSORS = "a pickle can run code when it is read; send a safetensors file"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
_FORBIDDEN = re.compile(r"[^!-\[\]-~]")  # what parsers of URLs differ in: controls, spaces, backslashes, non-ASCII
_PICKLE_HEAD = re.compile(r"gA[I-X]|UEsD")  # the base64 of protocols 2 to 5, and of the ZIP archive of torch.save


@frozen
class LocatesMedia:
    """A URL of an allowed scheme that every parser reads in the same way."""

    def mistake(self, value: object) -> str | None:
        """Return what is wrong with a URL, None if nothing is."""
        assert isinstance(value, str)
        match = _SCHEME.match(value)
        scheme = "" if match is None else match[1].lower()
        if scheme not in SCHEMES:
            return f"must be a URL that begins with data:, https:, http: or file:, got {describe(value)}"
        if scheme == "data":
            return mistake_in_data(value)
        if len(value) > URL_CHARACTERS_MAX:
            return f"must have at most {URL_CHARACTERS_MAX} characters, has {len(value)}"
        if (wrong_character := _FORBIDDEN.search(value)) is not None:
            return f"must not contain {describe(wrong_character[0])}: percent-encode it"
        try:
            parts = urlsplit(value)
            _ = parts.port  # raises, too
        except ValueError:  # whose message quotes the URL
            return f"is no URL that can be read: {describe(value)}"
        return _mistake_in_file(parts) if scheme == "file" else _mistake_in_web(parts)


def mistake_in_data(url: str) -> str | None:
    """Return what is wrong with the beginning of a data URL, None if nothing is; there is no other rule for them."""
    head, comma, _ = url[: DATA_HEAD_CHARACTERS_MAX + 1].partition(",")
    if not comma:
        return f"must have a comma within {DATA_HEAD_CHARACTERS_MAX} characters, as in data:image/png;base64,iVBO..."
    if not head.lower().endswith(";base64"):
        return f"must be base64, as in data:image/png;base64,iVBO..., got {describe(head)}"
    return "has no data behind its comma" if len(url) == len(head) + 1 else None


def _mistake_in_web(parts: SplitResult) -> str | None:
    if "@" in parts.netloc:
        return "must not contain a user name or a password"
    return _mistake_in_path(parts.path) if parts.hostname else "has no host"


def _mistake_in_file(parts: SplitResult) -> str | None:
    if parts.netloc.lower() not in {"", "localhost"} or not parts.path.startswith("/"):
        return "must name a file by its whole path, as in file:///srv/media/cat.png"
    if parts.query or parts.fragment:
        return "must have nothing behind its path: percent-encode ? and #"
    return _mistake_in_path(parts.path)


def _mistake_in_path(path: str) -> str | None:
    name = unquote(path).lower()
    suffix = next((suffix for suffix in PICKLES if name.endswith(suffix)), None)
    return None if suffix is None else f"is the URL of a {suffix} file: {SAFETENSORS}"


@frozen
class EmbeddingsFile:
    """A safetensors file with the embeddings of an image, in base64."""

    value_types: ClassVar[tuple[type, ...]] = (str,)  # for `protocol/strict/structure.py`, as `from_value` is

    url: str  # a data URL, like that of any image

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the file; raises `Mistakes` if it is empty or certainly no safetensors file."""
        assert isinstance(value, str)
        if not value:
            raise wrong("must not be empty")
        if _PICKLE_HEAD.match(value):
            raise wrong(f"is a pickle, as torch.save writes it: {SAFETENSORS}")
        if ":" in value[:DATA_HEAD_CHARACTERS_MAX]:
            raise wrong(f"must be the base64 of a safetensors file, got {describe(value)}")
        return cls(EMBEDDINGS_HEAD + value)
