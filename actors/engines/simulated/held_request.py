"""One request inside a simulated engine, with all of its scheduler's state."""

from __future__ import annotations

from math import inf

from attrs import Factory, define

from actors.engines.simulated.hand_off import Rendezvous, State
from actors.engines.simulated.kv_memory import KvMemory, Lease
from actors.engines.simulated.output import OutputSequence
from actors.engines.simulated.scores import PromptScorer
from protocol.block_hashes import block_digests, root_digest
from protocol.messages.generation import Generate, Started
from protocol.messages.media import MediaInfo, padded_tokens
from protocol.token_ids import TokenIds


@define(eq=False)
class HeldRequest:
    """One request, from its submission until nothing is held for it."""

    request: Generate
    prompt: TokenIds = TokenIds()  # its tokens, with its images' and videos' tokens in place of placeholders
    given: int = 0  # answer tokens at the end of the prompt: it was preempted, and computes them again
    digests: list[bytes] | None = None  # the prompt's full pages' digests, none without a cache
    sequence: OutputSequence | None = None
    lease: Lease | None = None
    cached: int = 0
    computed: int = 0  # tokens of the prompt, those found in the cache included
    has_begun: bool = False  # whether it computes: from then on it finds nothing more in the cache
    output: list[int] = Factory(list)
    ready_at: float = inf  # when its prompt has arrived from another engine, or can be handed over to it
    free_at: float = inf  # set by an abort
    stuck: bool = False
    scorer: PromptScorer | None = None  # of a prompt whose log probabilities are wanted
    version: str = ""  # of the weights that compute its tokens, as last announced
    state: State | None = None  # of a sequential hand-off: that a prefill holds, or that a decode takes

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
        """Compute the digests of its prompt, its keys in the cache, unless they are there."""
        if self.digests is not None:
            return
        if not self.prompt:
            self.prompt = padded_tokens(self.request.tokens, self.request.media, media)
        root = root_digest(self.request.cache_namespace)
        self.digests = block_digests(root, self.prompt.packed, page_size) if caches else []

    def reusable(self, page_size: int) -> list[bytes]:
        """Return the digests that it may find in the cache: the last token is always computed, for the next one.

        A prompt whose log probabilities are wanted is computed whole.
        """
        return [] if self.digests is None else self.digests[: self._pages_reusable(page_size)]

    def score(self, seed: int, vocabulary_size: int) -> None:
        """Compute the log probabilities of the computed part of its prompt, if they are wanted."""
        if not self.request.prompt_logprobs:
            return
        if self.scorer is None:
            self.scorer = PromptScorer(vocabulary_size, self.request.logprobs or 0, seed)
        end = min(self.computed, len(self.request.tokens) - self.request.resumed_tokens)
        self.scorer.add(self.request.tokens[self.scorer.tokens : end])

    def started(self, version: str) -> Started:
        """Return the beginning of its answer, which weights of this version compute."""
        self.version = version
        scores = None if self.scorer is None else self.scorer.scores()
        return Started(self.cached, scores=scores, version=version)

    def _pages_reusable(self, page_size: int) -> int:
        assert self.digests is not None
        if self.request.prompt_logprobs:
            return 0
        return min(len(self.digests), (len(self.prompt) - 1) // page_size)

    def find(self, memory: KvMemory, page_size: int) -> int:
        """Share the pages of its prompt computed by others since its admission; return the number of tokens in them."""
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
        """Start over: nothing is computed, and the prompt is continued by the answer so far."""
        self.prompt, self.given = self.prompt + TokenIds.of(self.answered), len(self.output)
        self.computed, self.has_begun, self.digests, self.lease = 0, False, None, None

    # Pages ------------------------------------------------------------------------------

    def has_page(self, memory: KvMemory, page_size: int) -> bool:
        """Whether it has a page for its last token, if need be by one page more than before."""
        assert self.lease is not None
        pages = -(-(len(self.request.tokens) + len(self.output)) // page_size)
        return pages <= self.lease.pages or memory.extend(self.lease)

    def publish_prompt(self, memory: KvMemory, page_size: int) -> None:
        """Share the full pages of its prompt computed so far."""
        assert self.digests is not None
        assert self.lease is not None
        for digest in self.digests[len(self.lease.shared) : self.computed // page_size]:
            memory.publish(self.lease, digest)

    def release_pages(self, memory: KvMemory, page_size: int, *, caches: bool) -> None:
        """Release its pages; they stay cached, its answer's too, for a request that continues it."""
        assert self.lease is not None
        if caches and self.output:
            shared = self.lease.shared
            rest = self.prompt[len(shared) * page_size :] + TokenIds.of(self.answered)
            rest = rest[: self.kv_tokens - len(shared) * page_size]
            before = shared[-1] if shared else root_digest(self.request.cache_namespace)
            for digest in block_digests(before, rest.packed, page_size):
                memory.publish(self.lease, digest)
        memory.release(self.lease)
