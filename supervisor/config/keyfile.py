"""The schema of the file of keys: the name, hash and limits of each client key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from attrs import field, frozen

from protocol.dialects.targets import TargetMs, Targets
from protocol.strict.checks import Holds, Matches, Within
from protocol.strict.mistakes import Mistake, Mistakes, join, segment
from protocol.strict.structure import structure
from protocol.tenants import TENANT_PATTERN

KEYS_MAX = 1024
"""A presented secret is compared with every key, in constant time, so the number of keys is bounded."""

PRIORITY_MAX = 1_000_000

NAME = Matches(
    r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", "1 to 64 letters, digits, dashes, dots, @ and _, a letter or a digit first"
)

TENANT = Matches(
    f"({TENANT_PATTERN})?", "empty, or 1 to 64 letters, digits, dashes, dots, @ and _, a letter or a digit first"
)


@frozen
class IsDigest:
    """The rule for a SHA-256 as printed by `hash-key`."""

    def mistake(self, value: object) -> str | None:
        """Return the mistake in a digest, without quoting it: the file may have the secret itself."""
        assert isinstance(value, str)
        return (
            None if re.fullmatch("[0-9a-f]{64}", value) else "must be the 64 hexadecimal digits that `hash-key` prints"
        )


KeyName = Annotated[str, NAME]
TenantName = Annotated[str, TENANT]
Digest = Annotated[str, IsDigest()]
Rate = Annotated[float, Within(at_least=1e-6, at_most=1_000_000)]  # below, a wait is too long for `Retry-After`
KeyLimit = Annotated[int, Within(at_least=1, at_most=1_000_000)]
GrammarName = Literal["json_schema", "regex", "ebnf", "structural_tag"]  # a `GrammarKind`, as files name it
Priority = Annotated[int, Within(at_least=-PRIORITY_MAX, at_most=PRIORITY_MAX)]


@frozen(kw_only=True)
class KeySection:
    """`[key.NAME]`: one client key, as the SHA-256 of its secret, and its limits and permissions."""

    sha256: Digest  # SHA-256 of the secret in hexadecimal digits, as `hash-key` prints it
    tenant: TenantName = ""  # keys of one tenant share caches of prompts and images; by default all keys are of one
    rate_per_s: Rate | None = None  # requests a second in the long run; beyond them `rate_limit_exceeded`
    burst: KeyLimit | None = None  # requests at once after an idle time; by default those of one second
    concurrency_max: KeyLimit | None = None  # generations that run or wait at a time; a request with `n = 4` has four
    connections_max: KeyLimit | None = None  # connections at a time; by default `gateway.limits.key_connections_max`
    priority: Priority | None = 0  # default priority of its requests, and their highest allowed one
    # kinds of grammars that its requests may use; by default those of `[gateway]`, and `[]` is none
    grammars: tuple[GrammarName, ...] | None = None
    # target of the first token, unless a request has one; by default the model's
    ttft_target_ms: TargetMs | None = None
    itl_target_ms: TargetMs | None = None  # target between two tokens, in the same way
    admin: bool = False  # whether it also opens the paths for an admin key

    @property
    def burst_max(self) -> int:
        """The largest burst of requests; at least 1, else no request could ever come."""
        return self.burst if self.burst is not None else max(1, math.ceil(self.rate_per_s or 1))

    @property
    def targets(self) -> Targets:
        """The targets of requests without their own."""
        return Targets(self.ttft_target_ms, self.itl_target_ms)


@frozen(kw_only=True)
class KeyFile:
    """The file of keys."""

    key: Annotated[dict[KeyName, KeySection], Holds(0, KEYS_MAX)] = field(factory=dict)


def read(data: object) -> dict[str, KeySection]:
    """Return the keys of a parsed file by name; raises `Mistakes` with every mistake in it."""
    keys = structure(data, KeyFile).key
    if mistakes := tuple(disagreements(keys)):
        raise Mistakes(mistakes)
    return keys


def disagreements(keys: Mapping[str, KeySection]) -> list[Mistake]:
    """Return the contradictions between individually valid keys."""
    names: dict[str, str] = {}
    mistakes = []
    for name, section in keys.items():
        path = join("key", segment(name))
        if (other := names.setdefault(section.sha256, name)) != name:
            mistakes.append(Mistake(f"{path}.sha256", f"is the secret of {other} too, so nobody could tell them apart"))
        if section.burst is not None and section.rate_per_s is None:
            mistakes.append(Mistake(f"{path}.burst", "means nothing without rate_per_s"))
    return mistakes
