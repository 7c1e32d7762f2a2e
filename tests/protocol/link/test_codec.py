"""A message is refused with a sentence if its values have another form than its fields."""

from __future__ import annotations

import msgspec
import pytest

from protocol.errors import PeerViolation
from protocol.link import codec
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ({"packed": b"1234567"}, "a Generate that cannot be read: 7 bytes are no token ids of 4 bytes each"),
        ({"packed": [1, 2]}, "Expected `bytes`, got `array`"),
        ([1, 2], "Expected `object`, got `array`"),
    ],
)
def test_token_ids_in_another_form_are_a_violation(tokens: object, sentence: str) -> None:
    good = codec.encode(Generate("a", TokenIds.of([7]), Sampling(1)))
    body = msgspec.msgpack.encode(msgspec.msgpack.decode(good[1:]) | {"tokens": tokens})
    with pytest.raises(PeerViolation, match=sentence):
        codec.decode(good[:1] + body)
