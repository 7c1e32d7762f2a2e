"""The images and videos that a system takes, its encoders, and its limits on both: drawn for one seed."""

from __future__ import annotations

import random
from typing import Any

from attrs import evolve, frozen

from actors.engines.encoding.limits import EncoderLimits
from actors.engines.simulated.spec import EncodingCosts
from actors.media.media import PreparationLimits
from protocol.messages.media import MediaForm, MediaInfo
from tests.rig.fake_engine import Costs
from tests.rig.vision import MEDIA_INFO
from tests.system.simulator.encoders import EncoderCosts, Gallery
from tests.system.simulator.media import LIMITS
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.pictures import Album

SHARES = {"sighted": 0.5}  # of the seeds, those whose model takes pictures; `python -m tests.system.hunt --pictures`: 1
BLIND_SHARE = 0.2  # of the others, those whose clients send some all the same
CONTEXT_MAX = 2048
MIB = 2**20


@frozen
class Sight:
    """What one seed has of pictures."""

    media: MediaInfo | None  # of its engines
    encoders: int
    fields: dict[str, Any]  # of its system

    def open(self, costs: Costs) -> None:
        """Let an engine take pictures; its context has room for them."""
        costs.media = self.media
        if self.media is not None:
            costs.context_max, costs.vocabulary_size = CONTEXT_MAX, VOCABULARY + 2


def draw_sight(rng: random.Random, *, needed: bool = False, blind: bool = False) -> Sight:
    """Draw what a seed has of pictures: in half of all seeds, nothing.

    An encoder may be `needed`, or a `blind` model to which clients send pictures all the same.
    """
    if blind or (rng.random() >= SHARES["sighted"] and not needed):
        album = Album(rng, 0.3, 8, sighted=False) if blind or rng.random() < BLIND_SHARE else None
        return Sight(None, 0, {"album": album})
    encoders = rng.choice((1, 1, 1, 2) if needed else (0, 1, 1, 2))
    items_max = rng.choice((2, 4, 8))
    fields = {
        "album": Album(rng, rng.choice((0.4, 0.9)), items_max, troubled=rng.random() < 0.5),
        "encoder_costs": encoder_costs(rng),
        "gallery": Gallery(),
        "media_limits": _limits(rng, items_max),
        "media_delay_s": rng.choice((0.0, 0.01, 0.2)),
    }
    return Sight(MEDIA_INFO if encoders else evolve(MEDIA_INFO, form=MediaForm.PIXELS), encoders, fields)


def _limits(rng: random.Random, items_max: int) -> PreparationLimits:
    if rng.random() < 0.5:
        return evolve(LIMITS, items_max=items_max)
    return PreparationLimits(
        items_max=items_max,
        tokens_max=LIMITS.tokens_max,
        prepare_s=rng.choice((3.0, 20.0)),
        fetched_bytes_max=items_max * MIB * rng.choice((2, 4)),
        prepared_bytes_max=rng.choice((30_000, 10**6)),
        fetches_max=rng.choice((1, 4)),
        decodes_max=rng.choice((1, 2)),
        waiting_max=rng.choice((1, 16)),
    )


def encoder_costs(rng: random.Random) -> EncoderCosts:
    """Draw the sizes, prices and limits of the encoders of one node."""
    return EncoderCosts(
        slots=rng.choice((1, 2, 8)),
        prices=EncodingCosts(fixed_s=rng.choice((0.01, 0.1, 0.4)), per_item_s=0.01, per_token_s=0.0),
        limits=EncoderLimits(
            batch_max=rng.choice((1, 3, 8)),
            batch_tokens_max=rng.choice((16, 10_000)),
            batch_wait_s=rng.choice((0.0, 0.01, 0.1)),
            waiting_s=8.0,
            batch_s=3.0,
            release_s=1.0,
            cache_bytes_max=rng.choice((0, 250, 10**6, 10**6)),
        ),
    )
