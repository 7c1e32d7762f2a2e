"""One request inside a simulated engine, in all that its scheduler knows of it."""

from __future__ import annotations

from math import inf

from attrs import Factory, define

from actors.engines.simulated.kv_memory import Lease
from actors.engines.simulated.output import OutputSequence
from protocol.messages import Generate


@define(eq=False)
class HeldRequest:
    """One request, from its submission until nothing is held for it."""

    request: Generate
    prompt: list[int] = Factory(list)  # its tokens, those of its images and videos in place of their placeholders
    given: int = 0  # tokens of its answer at the end of the prompt: it was preempted, and computes them again
    digests: list[bytes] | None = None  # of the prompt's full pages, computed when it is first considered
    sequence: OutputSequence | None = None
    lease: Lease | None = None
    cached: int = 0
    computed: int = 0  # tokens of the prompt
    output: list[int] = Factory(list)
    ready_at: float = inf  # when a prompt of another engine has arrived, or can be handed to that one
    free_at: float = inf  # set by an abort
    stuck: bool = False

    @property
    def room(self) -> int:
        """The room of its rendezvous, which a prefill and a decode share."""
        assert self.request.rendezvous is not None
        return self.request.rendezvous.room

    @property
    def kv_tokens(self) -> int:
        """The number of tokens in its pages; the last one of the answer is not there yet."""
        return self.computed + max(len(self.output) - self.given - 1, 0)

    @property
    def answered(self) -> list[int]:
        """The tokens of its answer behind its prompt."""
        return self.output[self.given :] if self.given else self.output

    def preempt(self) -> None:
        """Become a request that has computed nothing, and whose prompt goes on with what it was answered."""
        self.prompt, self.given = self.prompt + self.answered, len(self.output)
        self.computed, self.digests, self.lease = 0, None, None
