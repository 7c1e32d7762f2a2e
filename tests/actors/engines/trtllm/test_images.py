"""Images as TensorRT-LLM has them: positions from grids, hashes, the text of a prompt and its comparison."""

from __future__ import annotations

import json

import pytest
from attrs import evolve

from actors.engines.trtllm.images import (
    Outline,
    PlacedImages,
    Positions,
    hash_words,
    media_info,
    placed_images,
    positions,
)
from protocol.errors import BadRequest, EngineRefused, Unsupported
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import MediaForm, MediaInfo, MediaItem, Modality
from protocol.tensors import Dtype
from protocol.token_ids import TokenIds

START, IMAGE, END = 3, 6, 4
MEDIA = MediaInfo(MediaForm.EMBEDDINGS, 8, Dtype.BFLOAT16, 2, IMAGE, start_token=START)
OUTLINE = Outline(END, START)
CONFIG = {
    "model_type": "qwen2_5_vl",
    "torch_dtype": "float16",
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "text_config": {"hidden_size": 16},
}


def item(height: int, width: int) -> MediaItem:
    tokens = height * width // 4
    return MediaItem(Modality.IMAGE, f"{tokens:064x}", (1, height, width), tokens, MediaForm.EMBEDDINGS)


def prompt(*parts: int | MediaItem) -> Generate:
    tokens = [each for part in parts for each in ([IMAGE] * part.tokens if isinstance(part, MediaItem) else [part])]
    media = tuple(part for part in parts if isinstance(part, MediaItem))
    return Generate("", TokenIds.of(tokens), Sampling(1), media=media)


def placed(request: Generate) -> PlacedImages:
    return placed_images(request, MEDIA)


def test_a_square_image_has_the_positions_that_are_published() -> None:
    """The numbers are those of NVIDIA's test of attached embeddings, for an image of 2 x 2 tokens."""
    request = prompt(7, START, item(4, 4), END, 8)
    found = positions(len(request.tokens), placed(request), MEDIA.merge)
    assert found == Positions(([0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]), -2)


def test_a_wide_image_is_not_taken_for_a_square_one() -> None:
    request = prompt(START, item(2, 8), 9)
    axes = positions(len(request.tokens), placed(request), MEDIA.merge).axes
    assert axes == ([0, 1, 1, 1, 1, 5], [0, 1, 1, 1, 1, 5], [0, 1, 2, 3, 4, 5])


def test_texts_images_and_the_next_token_follow_each_other() -> None:
    text = prompt(5, 6 + 6, 7 + 7)
    assert positions(3, placed(text), 2) == Positions(([0, 1, 2],) * 3, 0)
    two = prompt(START, item(4, 4), END, START, item(4, 8))
    found = positions(len(two.tokens), placed(two), 2)
    assert found.axes[0] == [0, 1, 1, 1, 1, 3, 4, *[5] * 8]
    assert found.axes[1] == [0, 1, 1, 2, 2, 3, 4, *[5] * 4, *[6] * 4]
    assert found.axes[2] == [0, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
    assert found.delta == 9 - len(two.tokens), "the answer's first token is at 9"


def test_an_outline_has_one_placeholder_for_each_image_and_no_text() -> None:
    request = prompt(9, START, item(4, 4), END, 8, START, item(2, 4), END)
    written = OUTLINE.written(len(request.tokens), placed(request), IMAGE)
    assert written == [END, START, IMAGE, END, END, START, IMAGE, END]
    assert OUTLINE.written(2, (), IMAGE) == [END, END]


def test_parts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadRequest, match="placeholders"):
        placed(evolve(prompt(START, item(4, 4)), media=(item(4, 8),)))


@pytest.mark.parametrize("image", [IMAGE, 513])
def test_the_outline_is_replaced_by_the_prompt_and_images_stay_as_they_were_made(image: int) -> None:
    """Older versions have a placeholder beyond the vocabulary."""
    request = prompt(9, START, item(4, 4), 8)
    own, made = request.tokens.tolist(), [END, START, *[image] * 4, END]
    assert OUTLINE.filled(own, made, placed(request)) == [9, START, *[image] * 4, 8]


@pytest.mark.parametrize("made", [[END, START, *[IMAGE] * 5, END], [END, START, *[IMAGE] * 3, END], [END] * 6 + [9]])
def test_an_image_of_another_size_is_refused(made: list[int]) -> None:
    request = prompt(9, START, item(4, 4), 8)
    with pytest.raises(EngineRefused, match=f"makes {len(made)} tokens of a prompt with images that has 7"):
        OUTLINE.filled(request.tokens.tolist(), made, placed(request))


def test_a_hash_is_of_signed_words() -> None:
    assert hash_words("00000001" + "7fffffff" + "80000000" + "ffffffff" + "0" * 32) == [
        *(1, 2**31 - 1, -(2**31), -1),
        *(0, 0, 0, 0),
    ]


def test_what_an_engine_takes_is_read_from_its_model() -> None:
    files = {"config.json": json.dumps(CONFIG).encode()}
    media = media_info(files, IMAGE, 2, MediaForm.EMBEDDINGS)
    assert media == MediaInfo(MediaForm.EMBEDDINGS, 16, Dtype.FLOAT16, 2, IMAGE, None, START), "and no videos"
    assert media_info(files, IMAGE, 2, MediaForm.PIXELS, "bfloat16").dtype is Dtype.BFLOAT16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2_vl"}, "takes embeddings for qwen2_5_vl, and this is qwen2_vl"),
        ({"text_config": {}}, "no hidden_size"),
        ({"vision_end_token_id": None}, "no vision_end_token_id"),
        ({"torch_dtype": "float8"}, "of the type float8"),
        ({"torch_dtype": None}, "of the type None"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(changes: dict[str, object], words: str) -> None:
    files = {"config.json": json.dumps({**CONFIG, **changes}).encode()}
    with pytest.raises(Unsupported, match=words):
        media_info(files, IMAGE, 2, MediaForm.EMBEDDINGS)
