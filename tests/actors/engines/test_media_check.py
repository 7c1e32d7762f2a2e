"""Items that contradict their prompt, themselves or the engine are refused, with both numbers."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from actors.engines.media_check import check_item, check_media, check_pixels, item_places
from protocol.errors import BadRequest, Unsupported
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.tensors import NO_TENSOR, Dtype, Tensor
from protocol.token_ids import TokenIds
from tests.rig.encoders import IMAGE_TOKEN, MEDIA, VIDEO_TOKEN, embeddings, image, video

INFO = EngineInfo("any", "1", 100, 64, 128, 60, 4, 16, honours_seed=True, media=MEDIA)
DECODE = evolve(INFO, hand_off=HandOff.CONCURRENT)
PREFILL = evolve(DECODE, hand_off_address=b"x")
ALL = evolve(INFO, media=evolve(MEDIA, form=MediaForm.PIXELS))
TEXT = evolve(INFO, media=None)
MOVIE = evolve(video(), form=MediaForm.EMBEDDINGS, data=Tensor(Dtype.BFLOAT16, (8, 8), memoryview(bytes(128))))


def prompt(images: int, *items: MediaItem, videos: int = 0) -> Generate:
    return Generate(
        "r", TokenIds.of([1, *[IMAGE_TOKEN] * images, 2, *[VIDEO_TOKEN] * videos, 3]), Sampling(4), media=items
    )


@pytest.mark.parametrize(
    ("request_", "info"),
    [
        (prompt(0), INFO),
        (prompt(3, videos=2), TEXT),  # of an engine without images these are tokens as all others
        (prompt(4, embeddings()), PREFILL),
        (prompt(4, embeddings().place), DECODE),
        (prompt(4, image()), ALL),
        (prompt(8, MOVIE, embeddings("a"), embeddings("b"), videos=8), INFO),
    ],
)
def test_what_agrees_is_accepted(request_: Generate, info: EngineInfo) -> None:
    check_media(request_, info)


@pytest.mark.parametrize(
    ("request_", "info", "reason"),
    [
        (prompt(4, embeddings()), TEXT, "takes neither images nor videos"),
        (prompt(1), INFO, r"1 placeholders \(90\) of images, where its 0 images have 0 tokens"),
        (prompt(3, embeddings()), INFO, "3 placeholders .* of images, where its 1 images have 4 tokens"),
        (prompt(0, MOVIE, videos=4), INFO, r"4 placeholders \(91\) of videos, where its 1 videos have 8 tokens"),
        (prompt(4, image()), INFO, "image 1 is given as pixels, and the engine takes embeddings"),
        (prompt(4, embeddings()), DECODE, "given as embeddings, and the engine takes places"),
        (prompt(4, embeddings().place), PREFILL, "given as places, and the engine takes embeddings"),
        (prompt(4, embeddings()), ALL, "given as embeddings, and the engine takes pixels"),
        (prompt(0, MOVIE), evolve(INFO, media=evolve(MEDIA, video_token=None)), "takes no video"),
    ],
)
def test_what_a_prompt_and_its_items_disagree_on_is_refused(request_: Generate, info: EngineInfo, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        check_media(request_, info)


BEGIN = 89  # the token that begins an item
STARTED = evolve(INFO, media=evolve(MEDIA, start_token=BEGIN))
ONE, TWO = (
    embeddings("a"),
    evolve(embeddings("b"), grid=(1, 2, 4), tokens=2, data=Tensor(MEDIA.dtype, (2, 8), memoryview(bytes(32)))),
)


def written(*tokens: int, media: tuple[MediaItem, ...], resumed_tokens: int = 0) -> Generate:
    return Generate("r", TokenIds.of(tokens), Sampling(4), media=media, resumed_tokens=resumed_tokens)


def pictures(count: int) -> list[int]:
    return [IMAGE_TOKEN] * count


MIXED = written(1, BEGIN, *[VIDEO_TOKEN] * 8, BEGIN, *pictures(4), 2, BEGIN, *pictures(2), 3, media=(ONE, MOVIE, TWO))


def test_the_places_of_items_are_those_of_their_own_order_in_each_modality() -> None:
    assert item_places(MIXED, STARTED.media or MEDIA) == (range(11, 15), range(2, 10), range(17, 19))
    check_media(MIXED, STARTED)


@pytest.mark.parametrize("answer", [[IMAGE_TOKEN], [BEGIN, IMAGE_TOKEN, 5], [BEGIN]])
def test_tokens_of_an_answer_that_is_resumed_are_no_places(answer: list[int]) -> None:
    resumed = evolve(MIXED, tokens=TokenIds.of([*MIXED.tokens, *answer]), resumed_tokens=len(answer))
    check_media(resumed, STARTED)
    assert item_places(resumed, MEDIA) == item_places(MIXED, MEDIA)
    check_media(written(7, *answer, media=(), resumed_tokens=len(answer)), INFO)
    with pytest.raises(BadRequest):
        check_media(evolve(resumed, tokens=TokenIds.of([*MIXED.tokens, IMAGE_TOKEN, *answer])), STARTED)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (
            written(BEGIN, *pictures(4), BEGIN, *pictures(2), media=(TWO, ONE)),
            "image 1 has 2 tokens, and 4 of its placeholders",
        ),
        (written(BEGIN, *pictures(3), 5, *pictures(1), media=(ONE,)), "image 1 has 4 tokens, and 3 of its"),
        (written(BEGIN, *pictures(6), media=(ONE, TWO)), "image 1 has 4 tokens, and 6 of its"),
        (written(5, *pictures(4), media=(ONE,)), "of image 1 do not stand behind 89, the token"),
        (written(BEGIN, *pictures(4), media=(evolve(ONE, tokens=-1),)), "says that it has -1 tokens"),
    ],
)
def test_placeholders_that_are_not_those_of_their_item_are_refused(request_: Generate, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        check_media(request_, STARTED)


@pytest.mark.parametrize(
    ("item", "changes", "reason"),
    [
        (embeddings(), {"tokens": 5}, "says that it has 5 tokens, and its grid of 1 x 4 x 4 patches makes 4"),
        (embeddings(), {"grid": (1, 4, 5)}, "has 4 tokens, and its grid of 1 x 4 x 5 patches makes 0"),
        (embeddings(), {"grid": (-1, -4, 4), "tokens": 4}, "patches makes 0"),
        (embeddings(), {"digest": "ab"}, "64 hexadecimal digits"),
        (video(), {"seconds_per_grid": float("inf")}, "cannot last inf s"),
        (video(), {"seconds_per_grid": 0.0}, "cannot last 0.0 s"),
        (embeddings(), {"data": image().data}, "the embeddings of an item are uint8, where bfloat16 are needed"),
        (
            embeddings("a"),
            {"data": evolve(embeddings().data, shape=(3, 8))},
            r"4 tokens are \[3 x 8\], where \[4 x 8\]",
        ),
        (embeddings(), {"data": evolve(embeddings().data, data=memoryview(b""))}, "64 bytes comes with 0"),
        (embeddings().place, {"data": evolve(NO_TENSOR, shape=(1,))}, r"places .* are \[1\], where \[0\]"),
        (image(), {"data": evolve(image().data, dtype=Dtype.FLOAT32)}, "are float32, where uint8 are needed"),
        (image(), {"data": evolve(image().data, shape=(0, 56, 56, 3))}, r"not \[0 x 56 x 56 x 3\]"),
        (image(), {"data": evolve(image().data, shape=(1, 56, 28, 3))}, "4704 bytes comes with 9408"),
    ],
)
def test_an_item_that_contradicts_itself_is_refused_with_both_numbers(
    item: MediaItem, changes: dict[str, Any], reason: str
) -> None:
    check_item(item, MEDIA)
    with pytest.raises(BadRequest, match=reason):
        check_item(evolve(item, **changes), MEDIA)


def test_an_encoder_gets_pixels_of_what_it_encodes() -> None:
    check_pixels(image(), MEDIA)
    check_pixels(video(), MEDIA)
    with pytest.raises(BadRequest, match="pixels, not embeddings"):
        check_pixels(embeddings(), MEDIA)
    with pytest.raises(Unsupported, match="takes no video"):
        check_pixels(video(), evolve(MEDIA, video_token=None))
    with pytest.raises(Unsupported, match="takes no image"):
        check_pixels(evolve(video(), modality=Modality.IMAGE), evolve(MEDIA, image_token=None))
