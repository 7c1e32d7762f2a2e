"""Addresses at which nodes listen, as people write them in a file and nodes send them to each other."""

from __future__ import annotations

import re
from typing import ClassVar, Self

from attrs import frozen

from protocol.cluster import PORT
from protocol.strict.mistakes import describe, wrong

_WRITTEN = re.compile(rf"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):{PORT}")


@frozen
class Endpoint:
    """A host and a port where a node listens."""

    kinds: ClassVar[tuple[type, ...]] = (str,)

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Endpoint:
        """Return what `host:port` names; an IPv6 address stands in brackets."""
        host, _, port = text.rpartition(":")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @classmethod
    def structured(cls, value: object) -> Self:
        """Return the endpoint that a file names; raises `Mistakes` for text that names none."""
        assert isinstance(value, str)
        if _WRITTEN.fullmatch(value) is None:
            raise wrong(f"must be like 127.0.0.1:7401 or [::1]:7401, got {describe(value)}")
        endpoint = cls.read(value)
        return cls(endpoint.host, endpoint.port)

    def __str__(self) -> str:
        """Return it as people write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
