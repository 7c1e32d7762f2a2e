"""The ids and block hashes of a cache are those of the whole text, for drawn tokenizers, texts and states of the cache."""

from __future__ import annotations

import json
import threading
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from actors.text import prompt_cache
from actors.text.boundaries import boundaries
from actors.text.prompt_cache import Boundary, EncodedPrompt, PromptCache
from protocol.block_hashes import block_hashes_after, root_digest
from protocol.token_ids import TokenIds
from tests.rig.drawn_tokenizers import ADDED, KINDS, built, texts

PAGE_SIZES = (1, 2, 16, 64)
MANY = 10**6
kinds = pytest.mark.parametrize("kind", KINDS)


def ids(tokenizer: Tokenizer, text: str) -> TokenIds:
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return TokenIds.of(encoding.ids)


def whole(tokenizer: Tokenizer, text: str) -> TokenIds | None:
    """Return the ids of a text, None where the library itself fails: for tokens of spaces beside some that strip."""
    try:
        return ids(tokenizer, text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return None


def check(encoded: EncodedPrompt, tokens: TokenIds, namespace: str | None) -> None:
    assert encoded.tokens == tokens
    for blocks in encoded.blocks:
        expected = block_hashes_after(root_digest(namespace), tokens, blocks.page_size)
        assert (blocks.hashes, blocks.digest) == expected


def obey(data: st.DataObject, kind: str) -> None:
    """Draw a tokenizer and four related texts; each comes through one cache as it would be encoded whole."""
    added = data.draw(ADDED, "added tokens")
    tokenizer = built(kind, added, template=data.draw(st.booleans()))
    found = boundaries(json.loads(tokenizer.to_str()))
    if not found:
        return
    boundary = Boundary(*data.draw(st.sampled_from(sorted(found.items())), "boundary"))
    drawn = texts([token.content for token in added], boundary.text)
    first, more, other = data.draw(drawn), data.draw(drawn), data.draw(drawn)
    middle = data.draw(st.integers(0, len(first)))
    cache = PromptCache(data.draw(st.sampled_from((1, 3_000, 10_000, MANY)), "bytes"), threading.Lock())
    least, part = data.draw(st.sampled_from((1, 5, 30))), data.draw(st.sampled_from((10, 40, MANY)))
    with patch.multiple(prompt_cache, CUT_CHARACTERS_MIN=least, PART_CHARACTERS=part):
        for text in (first, first + more, first[:middle] + other, first):
            namespace = data.draw(st.sampled_from((None, "", "salt")))
            if (expected := whole(tokenizer, text)) is None:
                continue
            known = cache.find(text, boundary, "owner", namespace, PAGE_SIZES)
            encoded = cache.complete(known, lambda part: ids(tokenizer, part), MANY)
            check(encoded, expected, namespace)
            assert encoded.reused == known.reused_tokens
    statistics = cache.statistics()
    assert statistics.mismatches == 0


@kinds
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_ids_and_hashes_are_those_of_the_whole_text(kind: str, data: st.DataObject) -> None:
    obey(data, kind)


@pytest.mark.nightly
@kinds
@settings(max_examples=100_000 // 4 // len(KINDS), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_ids_and_hashes_are_those_of_a_hundred_thousand_whole_texts(kind: str, data: st.DataObject) -> None:
    obey(data, kind)
