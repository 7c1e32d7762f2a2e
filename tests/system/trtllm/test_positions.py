"""The positions that TensorRT-LLM is given are those of SGLang's own function, for grids of many shapes."""

from __future__ import annotations

import pytest

from tests.rig.host_parts import HEAD, parts_process

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

COMPARED = """
from random import Random
import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from actors.engines.trtllm.images import placed_images, positions
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import MediaForm, MediaInfo, MediaItem, Modality
from protocol.tensors import Dtype
from protocol.token_ids import TokenIds

START, IMAGE, VIDEO, MERGE = 3, 6, 7, 2
MEDIA = MediaInfo(MediaForm.EMBEDDINGS, 8, Dtype.BFLOAT16, MERGE, IMAGE, start_token=START)
random = Random(1)
for number in range(200):
    tokens, items = [], []
    for _ in range(random.randrange(5)):
        tokens += [9] * random.randrange(4)
        grid = (1, MERGE * random.randint(1, 9), MERGE * random.randint(1, 9))
        count = grid[1] * grid[2] // MERGE**2
        items.append(MediaItem(Modality.IMAGE, f"{number:064x}", grid, count, MediaForm.EMBEDDINGS))
        tokens += [START, *[IMAGE] * count]
    tokens += [8] * random.randint(1, 4)
    request = Generate("", TokenIds.of(tokens), Sampling(1), media=tuple(items))
    found = positions(len(tokens), placed_images(request, MEDIA), MERGE)
    for family in ("qwen2_vl", "qwen2_5_vl"):
        axes, delta = MRotaryEmbedding.get_rope_index(
            spatial_merge_size=MERGE, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
            model_type=family, tokens_per_second=2, input_ids=torch.tensor([tokens]), second_per_grid_ts=None,
            image_grid_thw=torch.tensor([item.grid for item in items]) if items else None, video_grid_thw=None,
        )
        assert axes[:, 0].tolist() == [*found.axes], (family, tokens)
        assert int(delta) == found.delta, (family, tokens)
"""


def test_positions_are_those_of_another_engine() -> None:
    with parts_process() as run:
        written = run({"compared": HEAD + COMPARED})
    assert written["compared"].endswith("done\n"), written["compared"]
