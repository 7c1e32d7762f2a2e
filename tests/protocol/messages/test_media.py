from __future__ import annotations

import pytest
from attrs import evolve

from protocol.errors import PeerViolation
from protocol.link import codec
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import (
    PADS_MIN,
    Encode,
    Encoded,
    MediaForm,
    MediaInfo,
    MediaItem,
    Modality,
    expected_shape,
    grid_tokens,
    padded_tokens,
)
from protocol.tensors import NO_TENSOR, Dtype, Tensor
from protocol.token_ids import TokenIds

IMAGE, VIDEO = 7, 8
INFO = MediaInfo(MediaForm.EMBEDDINGS, width=3, dtype=Dtype.FLOAT16, merge=2, image_token=IMAGE, video_token=VIDEO)


def item(digest: str = "ab" * 32, tokens: int = 2, modality: Modality = Modality.IMAGE) -> MediaItem:
    data = Tensor(Dtype.FLOAT16, (tokens, 3), memoryview(bytes.fromhex(digest)[:6] * tokens))
    return MediaItem(modality, digest, (1, 2, 2 * tokens), tokens, MediaForm.EMBEDDINGS, data)


@pytest.mark.parametrize(
    "message",
    [
        Generate("a", TokenIds.of([1, IMAGE, IMAGE]), Sampling(3), media=(item(), item("cd" * 32, 1))),
        Generate("a", TokenIds.of([1]), Sampling(3)),
        Generate("a", TokenIds.of([1, IMAGE, IMAGE]), Sampling(3), media=(item().place,)),
        Encode("a", item()),
        Encoded(item(), cached=True),
    ],
)
def test_a_message_with_media_is_the_same_after_it_has_crossed_a_link(message: Generate | Encode | Encoded) -> None:
    attached = b"".join(codec.attached(message))
    body = codec.encode(message)
    assert codec.decode(body, memoryview(attached)) == message
    assert len(attached) == sum(len(tensor.data) for tensor in message.tensors)


def test_the_bytes_of_a_tensor_are_no_part_of_a_body() -> None:
    assert len(codec.encode(Encode("a", item(tokens=1)))) == len(codec.encode(Encode("a", item(tokens=9))))


@pytest.mark.parametrize("extra", [-1, 1])
def test_bytes_that_do_not_fit_the_tensors_are_a_violation(extra: int) -> None:
    message = Encode("a", item())
    size = len(message.item.data.data) + extra
    with pytest.raises(PeerViolation, match="attached"):
        codec.decode(codec.encode(message), memoryview(bytes(size)))


def test_a_tensor_that_has_fewer_bytes_than_its_shape_is_not_sent() -> None:
    short = evolve(item().data, data=memoryview(b"123"))
    with pytest.raises(PeerViolation, match="has 12 bytes, not 3"):
        codec.attached(Encode("a", evolve(item(), data=short)))


def test_a_message_of_two_items_takes_exactly_two_tensors() -> None:
    message = Generate("a", TokenIds.of([1]), Sampling(3), media=(item(), item()))
    with pytest.raises(PeerViolation, match="1 tensors for 2 items"):
        message.with_tensors([NO_TENSOR])


def test_a_place_has_everything_but_the_tensor() -> None:
    place = item().place
    assert (place.form, place.data) == (MediaForm.PLACES, NO_TENSOR)
    assert evolve(place, form=item().form, data=item().data) == item()


@pytest.mark.parametrize(
    ("grid", "tokens"),
    [((1, 2, 2), 1), ((3, 4, 6), 18), ((1, 3, 2), 0), ((0, 2, 2), 0), ((1, -2, -2), 0), ((1, 2, 1), 0)],
)
def test_a_grid_makes_one_token_for_each_block_of_patches_and_none_if_it_cannot_be(
    grid: tuple[int, int, int], tokens: int
) -> None:
    assert grid_tokens(grid, 2) == tokens


def test_a_tensor_has_the_shape_that_its_form_demands() -> None:
    assert expected_shape(item(), INFO) == (2, 3)
    assert expected_shape(item().place, INFO) == (0,)
    assert expected_shape(evolve(item(), form=MediaForm.PIXELS), INFO) is None


def test_different_images_behind_the_same_text_share_the_tokens_before_them_alone() -> None:
    tokens = TokenIds.of([1, IMAGE, IMAGE, 2])
    one, same, other = (padded_tokens(tokens, [item(digest)], INFO) for digest in ("ab" * 32, "ab" * 32, "ac" * 32))
    assert one == same
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False, True]
    assert min(one[1:3]) >= PADS_MIN > max(one[0], one[3])


def test_each_modality_has_its_own_placeholders() -> None:
    video = item("cd" * 32, 1, Modality.VIDEO)
    padded = padded_tokens(TokenIds.of([IMAGE, IMAGE, VIDEO]), [video, item()], INFO)
    assert padded[:2] == padded_tokens(TokenIds.of([IMAGE, IMAGE]), [item()], INFO)
    assert padded[2:] == padded_tokens(TokenIds.of([VIDEO]), [video], INFO)


def test_tokens_without_media_stay_as_they_are() -> None:
    tokens = TokenIds.of([1, IMAGE])
    assert padded_tokens(tokens, [], INFO) is tokens
    assert padded_tokens(tokens, [item()], None) is tokens
