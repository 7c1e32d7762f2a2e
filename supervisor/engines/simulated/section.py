"""`[engine.NAME]` of a simulated engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from attrs import frozen

from actors.engines.simulated.spec import EXPERTS_MAX, Costs, EncodingCosts, Faults
from protocol.messages.media import MediaForm, MediaInfo
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake
from protocol.tensors import Dtype
from supervisor.config.adapters import AdaptersSection
from supervisor.config.limits import Count
from supervisor.config.schema import Cluster, EngineSection

Token = Annotated[int, Within(at_least=0, at_most=2**31 - 1)]


@frozen(kw_only=True)
class SimulatedMedia:
    """`[engine.NAME.simulated.media]`: the images and videos of an engine or an encoder."""

    # token id that stands for an image in a prompt; without it the engine takes no images
    image_token: Token | None = None
    # token id that stands for a video in a prompt; without it the engine takes no videos
    video_token: Token | None = None
    width: Count = 64  # numbers in an embedding
    merge: Count = 2  # patches in each direction that one token stands for

    def info(self, form: MediaForm) -> MediaInfo:
        """Return what the engine reports of them."""
        return MediaInfo(form, self.width, Dtype.BFLOAT16, self.merge, self.image_token, self.video_token)


@frozen(kw_only=True)
class SimulatedKeys:
    """`[engine.NAME.simulated]`: how an engine without a model answers, and how long it takes."""

    waiting_max: Count = 256  # requests that wait inside the engine; further ones get `overloaded`
    prefill_chunk: Count = 2048  # most prompt tokens of a step, if `[engine.NAME] prefill_chunk` is not given
    prefix_cache: bool = True  # whether beginnings of prompts are found in a cache
    length_min: Count = 16  # least tokens of an answer that ends by itself
    length_max: Count = 512  # most tokens of an answer that ends by itself
    seed: int = 0  # number that decides the answers and their lengths
    # experts in each of the layers of a mixture that it pretends to be, whose tokens can be recorded
    experts: Annotated[int, Within(at_least=0, at_most=EXPERTS_MAX)] = 0
    width: Count = 64  # numbers in a vector of an embedder
    media: SimulatedMedia | None = None  # images and videos that it takes; by default those of the model's folder
    costs: Costs = Costs()
    encoding_costs: EncodingCosts = EncodingCosts()
    faults: Faults = Faults()


@frozen(kw_only=True)
class SimulatedSection(EngineSection):
    """`[engine.NAME]` with `kind = "simulated"`."""

    reads_text: ClassVar[bool] = True  # its answers are sentences, as tokens of the model
    encodes: ClassVar[bool] = True
    embeds: ClassVar[bool] = True
    publishes_always: ClassVar[bool] = True  # unless its section says otherwise: it costs nothing

    kind: Literal["simulated"] = "simulated"
    simulated: SimulatedKeys = SimulatedKeys()
    # adapters that it pretends to have, each with answers of its own; without this table it takes none
    adapters: AdaptersSection | None = None

    @property
    def has_prefix_cache(self) -> bool:
        """Whether it has a cache of earlier prompts' beginnings."""
        return self.simulated.prefix_cache

    @property
    def prefill_chunk_default(self) -> int:
        """The prompt tokens of one engine step where `prefill_chunk` is not given."""
        return self.simulated.prefill_chunk

    def mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        """Yield the mistakes in this section at `path`."""
        if self.adapters is not None:
            yield from self.adapters.mistakes(f"{path}.adapters")
        media, key = self.simulated.media, f"{path}.simulated.media"
        if media is not None and media.image_token is None and media.video_token is None:
            yield Mistake(key, "has neither image_token nor video_token")
        for name, other in cluster.engines_of(SimulatedSection).items() if media is not None else ():
            if other.model == self.model and other.simulated.media != media:
                yield Mistake(key, f"differs from that of engine {name}, which has the same model")
                break
        for name, other in cluster.engines_of(SimulatedSection).items() if self.task != "generate" else ():
            if other.model == self.model and _vectors(other) != _vectors(self):
                why = f"vectors differ from those of engine {name}, which has the same model, by width or seed"
                yield Mistake(f"{path}.simulated", why)
                break
        if self.simulated.length_min > self.simulated.length_max:
            yield Mistake(f"{path}.simulated.length_min", f"must be at most length_max ({self.simulated.length_max})")


def _vectors(section: SimulatedSection) -> tuple[int, int]:
    """Return what decides the vectors of an embedder, beside the ids."""
    return section.simulated.width, section.simulated.seed
