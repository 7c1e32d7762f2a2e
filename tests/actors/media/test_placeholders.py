from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.media.placeholders import expand
from protocol.errors import BadRequest
from protocol.messages.media import Media, Modality
from protocol.token_ids import TokenIds
from tests.rig.vision import IMAGE, LAYOUT, VIDEO, image, pixels_of, video


def test_the_kth_placeholder_stands_for_the_kth_item_of_its_modality() -> None:
    tokens = TokenIds.of([1, IMAGE, 2, VIDEO, IMAGE, 3])
    items = [pixels_of(media) for media in (image("a", 2), image("b", 3), video("c", 1))]
    expected = [1, IMAGE, IMAGE, 2, VIDEO, IMAGE, IMAGE, IMAGE, 3]
    assert expand(tokens, items, LAYOUT).tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "media", "sentence"),
    [
        ([1, IMAGE], [], "the prompt has 1 place for images, and 0 images came with it"),
        ([1], [image("a")], "the prompt has 0 places for images, and 1 image came with it"),
        ([IMAGE], [image("a"), video("b")], "0 places for videos, and 1 video came"),
    ],
)
def test_a_prompt_with_other_places_than_items_is_refused_with_both_numbers(
    tokens: list[int], media: list[Media], sentence: str
) -> None:
    with pytest.raises(BadRequest, match=sentence):
        expand(TokenIds.of(tokens), [pixels_of(each) for each in media], LAYOUT)


def test_tokens_without_placeholders_are_returned_as_they_are() -> None:
    tokens = TokenIds.of([1, 2, 3])
    assert expand(tokens, [], LAYOUT) is tokens
    with_other_tokens = TokenIds.of([1, IMAGE])
    assert expand(with_other_tokens, [], None) is with_other_tokens


@given(st.lists(st.one_of(st.integers(0, 9), st.sampled_from(Modality)), max_size=40), st.data())
def test_every_other_token_stays_where_it_was(parts: list[int | Modality], data: st.DataObject) -> None:
    makers = {Modality.IMAGE: image, Modality.VIDEO: video}
    items, expected, tokens = [], list[int](), list[int]()
    for number, part in enumerate(parts):
        if not isinstance(part, Modality):
            tokens.append(part)
            expected.append(part)
            continue
        count = data.draw(st.integers(1, 5))
        placeholder = IMAGE if part is Modality.IMAGE else VIDEO
        items.append(pixels_of(makers[part](str(number), count)))
        tokens.append(placeholder)
        expected += [placeholder] * count
    assert expand(TokenIds.of(tokens), items, LAYOUT).tolist() == expected
