"""Block hashes: the values that SGLang 0.5.23 publishes for the same prompts, and what must not be equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.block_hashes import block_digests, block_hash, block_hashes, root_digest
from protocol.token_ids import TokenIds

PROMPT = list(range(3, 40))
PUBLISHED = (-9067047621753565086, 985323411251205651)
PUBLISHED_FOR_TENANT = (-7723130183852154806, -5967251257344239952)
TOKEN_LISTS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_hashes_are_those_that_the_engine_publishes() -> None:
    assert block_hashes(PROMPT, 16) == PUBLISHED


def test_a_cache_salt_begins_another_chain() -> None:
    assert block_hashes(PROMPT, 16, "tenant1") == PUBLISHED_FOR_TENANT
    assert not set(block_hashes(PROMPT, 16, "")) & set(PUBLISHED)


def test_only_full_pages_have_a_hash() -> None:
    assert block_hashes(PROMPT[:15], 16) == ()
    assert len(block_hashes(PROMPT[:16], 16)) == 1


@given(TOKEN_LISTS, TOKEN_LISTS, st.integers(1, 5))
def test_prompts_share_as_many_hashes_as_full_pages(left: list[int], right: list[int], page_size: int) -> None:
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    pairs = zip(block_hashes(left, page_size), block_hashes(right, page_size), strict=False)
    assert sum(one == other for one, other in pairs) == shared // page_size


@given(TOKEN_LISTS, st.integers(1, 5), st.none() | st.text(max_size=5))
def test_digests_go_on_from_any_block(tokens: list[int], page_size: int, salt: str | None) -> None:
    whole = block_digests(root_digest(salt), TokenIds.of(tokens).packed, page_size)
    cut = len(whole) // 2
    before = whole[cut - 1] if cut else root_digest(salt)
    assert block_digests(before, TokenIds.of(tokens[cut * page_size :]).packed, page_size) == whole[cut:]
    assert tuple(map(block_hash, whole)) == block_hashes(tokens, page_size, salt)
