"""The flush of an engine's prefix cache, for which TensorRT-LLM has no published call.

Requests with different salts share no blocks. So a flush gives each later request a salt of a new period: nothing from
before is found any more, and the engine drops the old blocks when it needs their room. A client chooses its own salt:
one that looks like a period's is changed from the first period on.
"""

from __future__ import annotations

from attrs import define

PERIOD, OLD = "flush:", "old:"
"""The beginnings of the salt of a period, and of the salt of a block that no request finds any more."""


@define(eq=False)
class PrefixCache:
    """The periods of one engine's prefix cache, each begun by a flush; requests of the first one keep their salts."""

    period: int = 0

    def flush(self) -> None:
        """Begin the next period."""
        self.period += 1

    def salt(self, own: str | None) -> str | None:
        """Return the salt with which the engine is asked for a request with a salt of its own, or none."""
        if not self.period and not (own or "").startswith(PERIOD):
            return own
        return f"{self._begin}{own or ''}"

    def own_salt(self, salt: str | None) -> str | None:
        """Return the own salt of the requests that can find a block with a salt; one of no request for an old block."""
        if salt is not None and salt.startswith(self._begin):
            return salt.removeprefix(self._begin) or None
        return f"{OLD}{salt or ''}" if self.period else salt

    @property
    def _begin(self) -> str:
        return f"{PERIOD}{self.period}/"
