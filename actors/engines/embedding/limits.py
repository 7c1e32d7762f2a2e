"""The limits of an embedder, and the observer of what becomes of its requests."""

from __future__ import annotations

from attrs import define, frozen

from protocol.messages.embedding import Embed


@frozen(kw_only=True)
class EmbedderLimits:
    """The limits on an embedder's time, in seconds.

    A request that has not ended after `computing_s` fails. If the engine holds it for `release_s` more, or for as long
    after its asker has left, the engine is stuck: a batch that is being computed ends first, which takes a while on a
    CPU.
    """

    computing_s: float = 600.0
    release_s: float = 30.0


@define(eq=False)
class EmbedderObserver:
    """Receives events of one embedder; this one ignores them."""

    def request_ended(self, request: Embed, outcome: str, seconds: float) -> None:
        """A request has ended, `seconds` after it was given to the engine: `ended`, `left`, or with an error's code."""

    def ended(self, request: Embed, outcome: str, began_at: float) -> bool:  # noqa: ARG002
        """The same, of a request given to the engine at `began_at`; return whether its span is recorded."""
        return False

    def aborted(self, seconds: float) -> None:
        """The engine has released a request, `seconds` after its asker had left."""
