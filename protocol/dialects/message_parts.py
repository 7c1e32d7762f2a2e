"""Parts of messages in all dialects: refusals, and hints about caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import attrs
from attrs import frozen

from protocol.messages.text import Role
from protocol.strict.mistakes import Mistake
from protocol.strict.objects import Harmless
from protocol.strict.tagged import tag

CACHE_HINTS: Harmless = {"cache_control": (dict,), "prompt_cache_breakpoint": (dict,)}
"""Hints about what to cache; the prefix cache of an engine needs none."""


@frozen
class RefusalPart:
    """A refusal in an earlier answer, which is a text of the assistant like any other."""

    harmless: ClassVar[Harmless] = CACHE_HINTS

    type: Literal["refusal"] = attrs.field(metadata=tag())
    refusal: str

    def piece(self, _: str) -> str:
        """Return the text."""
        return self.refusal


def misplaced_refusals(role: Role, parts: str | Sequence[object] | None, path: str) -> Iterator[Mistake]:
    """Yield a mistake for each refusal in a message that is not the assistant's."""
    if role is Role.ASSISTANT or parts is None or isinstance(parts, str):
        return
    for index, part in enumerate(parts):
        if isinstance(part, RefusalPart):
            yield Mistake(f"{path}[{index}]", f"only messages of the assistant can have refusals, not one of {role}")
