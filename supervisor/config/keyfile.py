"""The schema of the file of keys: the name, hash and limits of each client key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from attrs import field, frozen

from protocol.dialects.options import Holds, Matches, Within
from protocol.strict.mistakes import Mistake, Mistakes, join, segment
from protocol.strict.structure import structure

KEYS_MAX = 1024
"""Every presented key is compared with all that are known, so that the time it takes tells nothing."""

PRIORITY_MAX = 1_000_000

NAME = Matches(
    r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", "1 to 64 letters, digits, dashes, dots, @ and _, a letter or a digit first"
)


@frozen
class IsDigest:
    """A SHA-256 as `hash-key` prints it."""

    def mistake(self, value: object) -> str | None:
        """Say that a string is none, but not what it is: somebody may have put the secret itself there."""
        assert isinstance(value, str)
        return (
            None if re.fullmatch("[0-9a-f]{64}", value) else "must be the 64 hexadecimal digits that `hash-key` prints"
        )


KeyName = Annotated[str, NAME]
Digest = Annotated[str, IsDigest()]
Rate = Annotated[float, Within(at_least=1e-6, at_most=1_000_000)]  # at less the wait would be no time to tell
Some = Annotated[int, Within(at_least=1, at_most=1_000_000)]
GrammarName = Literal["json_schema", "regex", "ebnf", "structural_tag"]  # a `GrammarKind`, as files name it
Priority = Annotated[int, Within(at_least=-PRIORITY_MAX, at_most=PRIORITY_MAX)]


@frozen(kw_only=True)
class KeySection:
    """`[key.NAME]`: one key, by the SHA-256 of its secret, and what it may do."""

    sha256: Digest
    rate_per_s: Rate | None = None  # requests a second, in the long run
    burst: Some | None = None  # requests at once after a quiet time; without it, those of one second
    concurrency_max: Some | None = None  # generations at a time, run or waited for: a request with n = 4 is four
    connections_max: Some | None = None
    priority: Priority | None = 0  # of its requests that name none, and the highest that one can name; None: any
    grammars: tuple[GrammarName, ...] | None = None  # that its requests may use; None: as the gateway's section says
    admin: bool = False

    @property
    def burst_max(self) -> int:
        """How many requests may come at once; at least one, or none could ever come."""
        return self.burst if self.burst is not None else max(1, math.ceil(self.rate_per_s or 1))


@frozen(kw_only=True)
class KeyFile:
    """The whole file."""

    key: Annotated[dict[KeyName, KeySection], Holds(0, KEYS_MAX)] = field(factory=dict)


def read(data: object) -> dict[str, KeySection]:
    """Return the keys of a file by their names; raises `Mistakes` with every mistake in it."""
    keys = structure(data, KeyFile).key
    if mistakes := tuple(disagreements(keys)):
        raise Mistakes(mistakes)
    return keys


def disagreements(keys: Mapping[str, KeySection]) -> list[Mistake]:
    """Return what is wrong between keys that are each right by themselves."""
    names: dict[str, str] = {}
    mistakes = []
    for name, section in keys.items():
        at = join("key", segment(name))
        if (other := names.setdefault(section.sha256, name)) != name:
            mistakes.append(Mistake(f"{at}.sha256", f"is the secret of {other} too, so nobody could tell them apart"))
        if section.burst is not None and section.rate_per_s is None:
            mistakes.append(Mistake(f"{at}.burst", "means nothing without rate_per_s"))
    return mistakes
