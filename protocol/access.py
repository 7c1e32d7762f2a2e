"""The access to a route of the gateway, or to an operation of an engine."""

from __future__ import annotations

from enum import StrEnum


class Access(StrEnum):
    """The clients that may call."""

    OPEN = "open"  # everybody, even if keys are required
    KEY = "key"
    ADMIN = "admin"
