"""Addresses at which nodes listen, as cluster.toml has them and nodes announce them."""

from __future__ import annotations

import re
from typing import ClassVar, Self

from attrs import frozen

from protocol.messages.cluster import PORT
from protocol.strict.mistakes import describe, wrong

_TEXT = re.compile(rf"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]*):{PORT}")


@frozen
class Endpoint:
    """A host and a port where a node listens; an empty host is every address of its machine, of either family."""

    value_types: ClassVar[tuple[type, ...]] = (str,)

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Endpoint:
        """Return the endpoint of a valid `host:port`; an IPv6 address stands in brackets."""
        host, _, port = text.rpartition(":")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the endpoint of a value in a file; raises `Mistakes` for any other text."""
        assert isinstance(value, str)
        if _TEXT.fullmatch(value) is None:
            raise wrong(f"must be like 127.0.0.1:7401 or [::1]:7401, got {describe(value)}")
        endpoint = cls.read(value)
        return cls(endpoint.host, endpoint.port)

    def __str__(self) -> str:
        """Return `host:port`, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
