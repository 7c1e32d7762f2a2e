"""The sizes, costs and faults of a simulated engine.

A duration, of an engine's step or of a batch of an encoder or an embedder, is a sum of a few costs, each in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Annotated, Protocol

from attrs import frozen

from actors.kit.hand_off import DIGEST_BYTES
from protocol.messages.adapters import ADAPTERS_MAX
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.media import MediaInfo
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake

ADDRESS = b"simulated"
"""The address of every simulated prefill: nothing listens there."""

Count = Annotated[int, Within(at_least=1, at_most=2**31 - 1)]
Price = Annotated[float, Within(at_least=0)]
Share = Annotated[float, Within(at_least=0, at_most=1)]


@frozen(kw_only=True)
class Costs:
    """`[engine.NAME.simulated.costs]`: the costs of one engine step, of an abort and of a transfer.

    The defaults are of the order of an 8B model on one recent GPU, and measured on none:
    `python -m bench.calibration.fit` fits them to a server that runs.
    """

    fixed_s: Annotated[float, Within(above=0)] = 0.008  # each step: above all, reading the weights once
    per_prefill_token_s: Price = 0.00003  # each prompt token that the step computes
    per_running_s: Price = 0.00005  # each request that takes part in the step
    per_kv_token_s: Price = 0.0  # each token of KV memory that the step reads
    release_s: Price = 0.0  # from an abort until the slot and its pages are free
    transfer_s: Price = 0.0  # from the end of a prefill until the KV cache is at the decode

    def step_s(self, prefill_tokens: int, running: int, kv_tokens: int) -> float:
        """Return how long a step lasts, in seconds."""
        return (
            self.fixed_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_running_s * running
            + self.per_kv_token_s * kv_tokens
        )


@frozen(kw_only=True)
class EncodingCosts:
    """`[engine.NAME.simulated.encoding_costs]`: the costs of a batch of an encoder or embedder, measured on none."""

    fixed_s: Annotated[float, Within(above=0)] = 0.004  # each batch
    per_item_s: Price = 0.001  # each image, video or text of the batch
    per_token_s: Price = 0.00001  # each token of the batch

    def batch_s(self, items: int, tokens: int) -> float:
        """Return how long a batch lasts, in seconds."""
        return self.fixed_s + self.per_item_s * items + self.per_token_s * tokens


class FaultDraws(Protocol):
    """A source of the random numbers that decide faults, such as a seeded `random.Random`."""

    def random(self) -> float:
        """Return the next number from 0 up to 1."""


@frozen(kw_only=True)
class Faults:
    """`[engine.NAME.simulated.faults]`: how an engine misbehaves; not at all by default."""

    slow: Annotated[float, Within(above=0)] = 1.0  # factor by which steps last longer than their cost
    stuck: Share = 0.0  # share of aborted requests that keep slot and memory while this is above 0
    refuse: Share = 0.0  # share of requests that are found wrong when their prompt is computed
    stall: Share = 0.0  # share of steps after which nothing happens for `stall_s`, releases included
    stall_s: Annotated[float, Within(at_least=0)] = 1.0  # duration of such a pause
    # time from the start to a crash, or from when this is set
    crash_after_s: Annotated[float, Within(above=0)] | None = None


EXPERTS_MAX = 1024


@frozen(kw_only=True)
class SimulatedSpec:
    """Sizes, costs and faults of one simulated engine; sizes are of each rank, and lengths in tokens."""

    leg: Leg = Leg.BOTH  # which part of a request it computes
    hand_off: HandOff = HandOff.CONCURRENT  # of a leg of a pair
    ranks: Count = 1  # data-parallel ones, each with slots, KV memory and steps of its own
    slots: Count = 64  # requests that run at once
    waiting_max: Annotated[int, Within(at_least=0, at_most=2**31 - 1)] = 64  # requests that wait for a slot
    kv_tokens_max: Count = 131_072
    context_max: Count = 32_768
    page_size: Count = 16
    prefill_chunk: Count = 2_048  # tokens that one step computes of all prompts together
    prefix_cache: bool = True
    vocabulary_size: Annotated[int, Within(at_least=2, at_most=2**31 - 1)] = 32_000
    eos_id: Annotated[int, Within(at_least=0)] | None = None  # without one no answer ends by itself
    length_min: Count = 16  # tokens of an answer that ends by itself, the eos token not counted
    length_max: Count = 512
    seed: int = 0
    media: MediaInfo | None = None  # None: neither images nor videos
    adapters_max: Annotated[int, Within(at_least=0, at_most=ADAPTERS_MAX)] = 0  # LoRA adapters at a time; 0: none
    experts: Annotated[int, Within(at_least=0, at_most=EXPERTS_MAX)] = 0  # in each layer; 0: it is no mixture
    costs: Costs = Costs()
    faults: Faults = Faults()

    @property
    def pages(self) -> int:
        """The number of pages of KV memory."""
        return self.kv_tokens_max // self.page_size

    @property
    def is_sequential(self) -> bool:
        """Whether it is a leg of a pair whose prefill returns a state."""
        return self.leg is not Leg.BOTH and self.hand_off is HandOff.SEQUENTIAL

    @property
    def layout(self) -> bytes:
        """A digest of the properties in which the KV caches of a prefill and its decode must agree."""
        return sha256(repr((self.vocabulary_size, self.page_size, self.seed)).encode()).digest()[:DIGEST_BYTES]

    @property
    def info(self) -> EngineInfo:
        """The properties and limits that the engine reports."""
        return EngineInfo(
            kind="simulated",
            version="1",
            vocabulary_size=self.vocabulary_size,
            context_max=self.context_max,
            kv_tokens_max=self.pages * self.page_size,
            request_tokens_max=min(self.context_max, self.pages * self.page_size),
            running_max=self.slots,
            page_size=self.page_size,
            honours_seed=True,
            hand_off=HandOff.NONE if self.leg is Leg.BOTH else self.hand_off,
            hand_off_address=ADDRESS if self.leg is Leg.PREFILL else None,
            ranks=self.ranks,
            data_parallel=self.ranks,
            media=self.media,
        )

    def prefill_and_transfer_s(self, tokens: int) -> float:
        """Return the time for a prompt alone, nothing cached, and for the transfer of its KV cache.

        A state is of a computed prompt: the time is that of the transfer.
        """
        if self.is_sequential:
            return self.costs.transfer_s
        chunk = self.prefill_chunk
        steps = (self.costs.step_s(min(chunk, tokens - done), 1, done) for done in range(0, tokens, chunk))
        return sum(steps) + self.costs.transfer_s

    def disagreements(self) -> Iterator[Mistake]:
        """Yield the contradictions between keys that are each valid alone."""
        if self.pages < 2:
            yield Mistake("kv_tokens_max", f"is less than two pages of {self.page_size} tokens")
        if self.context_max < 2:
            yield Mistake("context_max", "leaves no room for a prompt and an answer")
        if self.length_min > self.length_max:
            yield Mistake("length_min", f"must be at most length_max ({self.length_max}), got {self.length_min}")
        if self.eos_id is not None and self.eos_id >= self.vocabulary_size:
            yield Mistake("eos_id", f"the vocabulary ends at {self.vocabulary_size - 1}, got {self.eos_id}")
        placeholders = [] if self.media is None else [self.media.image_token, self.media.video_token]
        if any(token is not None and token >= self.vocabulary_size for token in placeholders):
            yield Mistake("media", f"the vocabulary ends at {self.vocabulary_size - 1}, got {placeholders}")
