"""Messages about an engine itself: its properties, its load, its liveness, and the flush of its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from attrs import evolve, frozen

from protocol.messages.adapters import Adapter
from protocol.messages.embedding import EmbeddingInfo
from protocol.messages.generation import GrammarKind
from protocol.messages.kind import Kind, Message
from protocol.messages.media import MediaForm, MediaInfo
from protocol.model_folder import Digest


@frozen
class GetInfo(Message):
    """Ask an engine for its properties and limits; the result is `EngineInfo`."""


class HandOff(StrEnum):
    """The way in which a prefill hands its KV cache to a decode."""

    NONE = "none"  # the engine computes both legs
    CONCURRENT = "concurrent"  # both legs are asked at once, and meet at a rendezvous
    SEQUENTIAL = "sequential"  # the prefill returns a state, with which the decode is asked


@frozen
class EngineInfo(Message):
    """The properties and limits of an engine; lengths are in tokens.

    It has `data_parallel` ranks that requests can name, each with KV memory for `kv_tokens_max` tokens and room for
    `running_max` requests at once; `ranks` also counts ranks that share their requests.
    """

    kind: str
    version: str
    vocabulary_size: int
    context_max: int  # prompt and answer together
    kv_tokens_max: int  # all running requests of one rank together
    request_tokens_max: int  # prompt and answer of one request together
    running_max: int
    page_size: int
    honours_seed: bool
    grammars: tuple[GrammarKind, ...] = ()  # the supported kinds
    hand_off: HandOff = HandOff.NONE
    hand_off_address: bytes | None = None  # of a prefill, in bytes of its kind; None of any other engine
    ranks: int = 1
    digest: Digest = ()  # empty if its model's folder has not been read
    media: MediaInfo | None = None  # None: it takes neither images nor videos
    metrics: bool = False  # whether it answers `GetMetrics`
    data_parallel: int = 1
    computes_ahead: bool = False  # whether the cache also has the token that stopped an answer
    operations: tuple[str, ...] = ()  # the names of the rows of `operations.OPERATIONS` that it carries out
    adapters: tuple[Adapter, ...] = ()  # the LoRA adapters that are loaded
    hand_off_terms: tuple[tuple[str, str], ...] = ()  # of a leg of a pair: names and values, beside those in `terms`
    embedding: EmbeddingInfo | None = None  # of an embedder, which computes no answers; None of any other engine
    diffusion_block: int = 0  # tokens that a diffusion model computes together; 0: its tokens come one by one

    @property
    def media_form(self) -> MediaForm | None:
        """The form of the items in its requests: only places for a decode, since the prefill computes with them."""
        if self.media is None:
            return None
        return MediaForm.PLACES if self.is_decode else self.media.form

    @property
    def terms(self) -> tuple[tuple[str, str], ...]:
        """The terms of its hand-off, by name, on which both legs of a pair must agree (`protocol/pairing.py`)."""
        own = (("kind", self.kind), ("hand-off", self.hand_off.value), ("page_size", str(self.page_size)))
        return *own, *self.hand_off_terms

    @property
    def returns_states(self) -> bool:
        """Whether it is a sequential prefill, which returns a state and no tokens."""
        return self.hand_off is HandOff.SEQUENTIAL and self.hand_off_address is not None

    @property
    def is_decode(self) -> bool:
        """Whether it computes no prompts, which a prefill hands over to it."""
        return self.hand_off is not HandOff.NONE and self.hand_off_address is None


ENCODER_OPERATIONS = ("flush-cache",)
"""The operations of every encoder, which its node carries out: its embeddings are kept there."""


def encoder_info(kind: str, version: str, media: MediaInfo, batch_max: int, digest: Digest = ()) -> EngineInfo:
    """Return the info of an encoder; the properties of token engines are 0."""
    return EngineInfo(
        kind=kind,
        version=version,
        vocabulary_size=0,
        context_max=0,
        kv_tokens_max=0,
        request_tokens_max=0,
        running_max=batch_max,
        page_size=0,
        honours_seed=False,
        digest=digest,
        media=media,
        operations=ENCODER_OPERATIONS,
    )


@frozen
class Ping(Message):
    """Ask whether an engine is alive; only its scheduler answers, or its work. The result is `Alive`."""


@frozen
class Alive(Message):
    """An engine is alive; `held_up` while it waits for a compiler or a disk, and so answers and releases nothing."""

    held_up: bool = False


@frozen
class GetLoad(Message):
    """Ask an engine for its own count of its load; the result is `EngineLoad`."""


@frozen
class WatchLoad(Message):
    """Follow the load of an engine, counted by its scheduler; replies follow changes."""


@frozen
class RankLoad:
    """The load of one rank of an engine, counted by its scheduler; `hit_rate` is from 0 to 1.

    `waiting_tokens` are the uncached tokens of waiting prompts, `throughput` the generated tokens a second.
    """

    running: int = 0
    slots: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_tokens_used: int = 0
    kv_tokens_max: int = 0
    hit_rate: float = 0.0
    throughput: float = 0.0


@frozen
class EngineLoad(Message):
    """An engine's own count of its requests and of their KV memory, in tokens.

    `by_rank` has the load of each rank in order, for a `WatchLoad`; for a `GetLoad`, only if there are several.
    """

    running: int
    waiting: int
    kv_tokens_used: int
    by_rank: tuple[RankLoad, ...] = ()

    @classmethod
    def of_ranks(cls, ranks: Sequence[RankLoad]) -> EngineLoad:
        """Return the load of an engine from the loads of its ranks."""
        return cls(
            running=sum(rank.running for rank in ranks),
            waiting=sum(rank.waiting for rank in ranks),
            kv_tokens_used=sum(rank.kv_tokens_used for rank in ranks),
            by_rank=tuple(ranks),
        )

    @property
    def totals(self) -> EngineLoad:
        """The same for a `GetLoad`: without the load of a single rank."""
        return self if len(self.by_rank) > 1 else evolve(self, by_rank=())


@frozen
class Done(Message):
    """A control operation was carried out."""


KINDS = (
    Kind(5, GetInfo, result=EngineInfo),
    Kind(6, EngineInfo),
    Kind(7, GetLoad, result=EngineLoad),
    Kind(8, EngineLoad),
    Kind(43, WatchLoad, replies=(EngineLoad,), result=Done),
    Kind(10, Done),
    Kind(29, Ping, result=Alive),
    Kind(49, Alive),
)
