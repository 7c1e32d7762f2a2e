"""One request inside a simulated engine, in all that its scheduler knows of it."""

from __future__ import annotations

from math import inf

from attrs import Factory, define

from actors.engines.simulated.hand_off import Rendezvous
from actors.engines.simulated.kv_memory import KvMemory, Lease
from actors.engines.simulated.output import OutputSequence
from protocol.block_hashes import block_digests, pack_tokens, root_digest
from protocol.messages.generation import Generate
from protocol.messages.media import MediaInfo, padded_tokens


@define(eq=False)
class HeldRequest:
    """One request, from its submission until nothing is held for it."""

    request: Generate
    prompt: list[int] = Factory(list)  # its tokens, those of its images and videos in place of their placeholders
    given: int = 0  # tokens of its answer at the end of the prompt: it was preempted, and computes them again
    digests: list[bytes] | None = None  # of the prompt's full pages, none without a cache
    sequence: OutputSequence | None = None
    lease: Lease | None = None
    cached: int = 0
    computed: int = 0  # tokens of the prompt, those found in the cache included
    has_begun: bool = False  # to compute: from then on it finds nothing more in the cache
    output: list[int] = Factory(list)
    ready_at: float = inf  # when a prompt of another engine has arrived, or can be handed to that one
    free_at: float = inf  # set by an abort
    stuck: bool = False

    @property
    def room(self) -> int:
        """The room of its rendezvous, which a prefill and a decode share."""
        return Rendezvous.decode(self.request.hand_off).room

    @property
    def kv_tokens(self) -> int:
        """The number of tokens in its pages; the last one of the answer is not there yet."""
        return self.computed + max(len(self.output) - self.given - 1, 0)

    @property
    def answered(self) -> list[int]:
        """The tokens of its answer behind its prompt."""
        return self.output[self.given :] if self.given else self.output

    def look_up(self, page_size: int, media: MediaInfo | None, *, caches: bool) -> None:
        """Compute the digests of its prompt, unless they are there: what it looks for in the cache."""
        if self.digests is not None:
            return
        if not self.prompt:
            tokens, items = self.request.tokens, self.request.media
            self.prompt = padded_tokens(tokens, items, media) if items else tokens
        root = root_digest(self.request.cache_salt)
        self.digests = block_digests(root, pack_tokens(self.prompt), page_size) if caches else []

    def reusable(self, page_size: int) -> list[bytes]:
        """Return the digests of what it may find: one token is computed, as the next one comes out of that."""
        return [] if self.digests is None else self.digests[: self._pages_reusable(page_size)]

    def _pages_reusable(self, page_size: int) -> int:
        assert self.digests is not None
        return min(len(self.digests), (len(self.prompt) - 1) // page_size)

    def find(self, memory: KvMemory, page_size: int) -> int:
        """Share what others have computed of its prompt since it was admitted; return how many tokens that is."""
        assert self.digests is not None
        assert self.lease is not None
        if self.has_begun:
            return 0
        before, shared, pages = self.computed, self.lease.shared, self._pages_reusable(page_size)
        while len(shared) < pages and memory.share(self.lease, self.digests[len(shared)]):
            self.computed += page_size
        if not self.given:
            self.cached = self.computed
        return self.computed - before

    def preempt(self) -> None:
        """Become a request that has computed nothing, and whose prompt goes on with what it was answered."""
        self.prompt, self.given = self.prompt + self.answered, len(self.output)
        self.computed, self.has_begun, self.digests, self.lease = 0, False, None, None
