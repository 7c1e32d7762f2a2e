"""The refusal of a content."""

from __future__ import annotations

from typing import Literal

Code = Literal["invalid", "unsupported", "too_large", "memory", "bug"]


class ContentRefusal(Exception):  # named as what happened
    """A content is refused, with a sentence for the client that sent it."""

    def __init__(self, detail: str, code: Code = "invalid") -> None:
        super().__init__(detail)
        self.detail, self.code = detail, code
