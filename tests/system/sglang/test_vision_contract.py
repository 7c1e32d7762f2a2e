"""The contracts of engines and encoders, kept by SGLang's where models take images and videos."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from actors.media.layout import VisionLayout
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor
from tests.contracts.encoder import check_encoder
from tests.contracts.engine import check_engine
from tests.rig.pictured_items import seeing_model
from tests.rig.random_vision_models import random_vision_model
from tests.system.sglang.conftest import EACH_FAMILY, MakeEncoder, MakeEngine

pytestmark = pytest.mark.engine


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "has_tower"), [("qwen2_vl", True), ("qwen2_5_vl", False)])
async def test_sglangs_engine_keeps_the_contract(family: str, has_tower: bool, make_engine: MakeEngine) -> None:
    await check_engine(lambda: make_engine(model_path=str(random_vision_model(family)), has_tower=has_tower))


def item(layout: VisionLayout, number: int, modality: Modality) -> MediaItem:
    frames, height, width = (1, 84, 112) if modality is Modality.IMAGE else (4, 84, 112)
    pixels = memoryview(Random(number).randbytes(frames * height * width * 3))
    fit = layout.fit_image(height, width) if modality is Modality.IMAGE else layout.fit_video(frames, height, width)
    data = Tensor(Dtype.UINT8, (frames, height, width, 3), pixels)
    seconds = None if modality is Modality.IMAGE else 1.0
    return MediaItem(modality, f"{number:064x}", fit.grid, fit.tokens, MediaForm.PIXELS, data, seconds)


@EACH_FAMILY
async def test_sglangs_encoder_keeps_the_contract(family: str, make_encoder: MakeEncoder) -> None:
    """To the last bit: on a CPU an item is computed alone, whatever its batch."""
    model = seeing_model(random_vision_model(family))
    await check_encoder(lambda: make_encoder(model_path=str(model.folder)), partial(item, model.layout))
