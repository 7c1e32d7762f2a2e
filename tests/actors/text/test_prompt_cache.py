"""The prompt cache: what it reuses, keeps, evicts, refuses and counts."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Sequence

import pytest

from actors.kit.offload import turns
from actors.text.first_parts import SEAM_TOKENS, TooManyTokens
from actors.text.prompt_cache import TURN_CHARACTERS, Boundary, EncodedPrompt, PromptCache
from protocol.block_hashes import block_hashes
from protocol.token_ids import TokenIds

BOUNDARY = Boundary("|", 1)
PAGES = (1, 16)
MANY = 10**6


class Tokenizer:
    """A tokenizer of one id a character, which notes what it encodes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> TokenIds:
        self.texts.append(text)
        return ids(text)


def ids(text: str) -> TokenIds:
    return TokenIds.of([1 if character == "|" else ord(character) for character in text])


def a_cache(bytes_max: int = MANY) -> PromptCache:
    return PromptCache(bytes_max, threading.Lock())


def segments(*letters: str, length: int = 300) -> str:
    return "".join([letter * (length - 1) + "|" for letter in letters])


def ask(
    cache: PromptCache,
    text: str,
    encode: Tokenizer | None = None,
    owner: str = "owner",
    namespace: str | None = None,
    page_sizes: Sequence[int] = PAGES,
    tokens_max: int = MANY,
) -> EncodedPrompt:
    found = cache.find(text, BOUNDARY, owner, namespace, page_sizes)
    return cache.complete(found, encode or Tokenizer(), tokens_max)


def test_only_what_is_new_is_encoded() -> None:
    cache, encode = a_cache(), Tokenizer()
    first = segments("a", "b") + "open"
    assert ask(cache, first, encode).reused == 0
    second = segments("a", "b", "c") + "another"
    found = cache.find(second, BOUNDARY, "owner", None, PAGES)
    assert (found.reused_tokens, found.new_characters) == (600, 307)
    encoded = cache.complete(found, encode, MANY)
    assert (encoded.tokens, encoded.reused) == (ids(second), 600)
    assert encode.texts == [first, f"|{segments('c')}another"]
    for blocks in encoded.blocks:
        assert tuple(blocks.hashes) == block_hashes(ids(second), blocks.page_size)
    statistics = cache.statistics()
    assert (statistics.reused_tokens, statistics.encoded_tokens, statistics.segments) == (600, 604 + 307, 3)


def test_a_text_that_ends_with_a_boundary_is_reused_whole() -> None:
    cache = a_cache()
    text = segments("a", "b")
    ask(cache, text)
    assert ask(cache, text).reused == len(text)
    assert ask(cache, text).tokens == ids(text)


def test_owners_and_salts_share_nothing() -> None:
    cache = a_cache()
    text = segments("a", "b")
    plain = ask(cache, text)
    assert ask(cache, text, owner="other").reused == 0
    salted = ask(cache, text, namespace="salt")
    assert salted.reused == 0
    assert [tuple(blocks.hashes) for blocks in salted.blocks] == [
        block_hashes(ids(text), size, "salt") for size in PAGES
    ]
    assert salted.blocks != plain.blocks
    assert ask(cache, text, page_sizes=(16,)).reused == 0
    assert ask(cache, text, namespace="salt").reused == ask(cache, text, owner="other").reused == len(text)


def test_a_refused_text_leaves_nothing() -> None:
    cache = a_cache()
    with pytest.raises(TooManyTokens, match="more than 100"):
        ask(cache, segments(*"abcdefghij" * 4), tokens_max=100)
    assert cache.statistics().segments == 0
    slightly = segments("a")
    assert ask(cache, slightly, tokens_max=299).tokens == ids(slightly)
    assert cache.statistics().segments == 0
    ask(cache, slightly, tokens_max=300)
    with pytest.raises(TooManyTokens):
        ask(cache, segments(*"abcdefghij" * 4), tokens_max=0)
    assert cache.statistics().segments == 1


@pytest.mark.parametrize("known", [False, True])
def test_a_refusal_encodes_little_more_than_what_would_fit(known: bool) -> None:
    cache, encode = a_cache(), Tokenizer()
    text = segments(*"ab" * 1_000)
    if known:
        ask(cache, text[:30_000])
    with pytest.raises(TooManyTokens):
        ask(cache, text, encode, tokens_max=10_000)
    assert sum(map(len, encode.texts)) <= 8 * (10_000 + SEAM_TOKENS)
    endless = segments("a") + "b" * 10_000_000
    encode.texts.clear()
    with pytest.raises(TooManyTokens):
        ask(cache, endless, encode, tokens_max=10_000)
    assert sum(map(len, encode.texts)) <= 8 * (10_000 + SEAM_TOKENS) + 300


def test_evicting_everything_leaves_nothing_counted() -> None:
    cache = a_cache(1)
    for owner in "abc":
        assert ask(cache, segments(*"abcdef"), owner=owner).tokens == ids(segments(*"abcdef"))
    statistics = cache.statistics()
    assert (statistics.size_bytes, statistics.segments, statistics.evicted) == (0, 0, 18)


def test_the_end_of_the_least_recent_text_is_evicted_first() -> None:
    cache = a_cache(4 * 5_000)  # about four and a half segments
    for letters in ("ab", "cd", "ab", "ce"):
        ask(cache, segments(*letters))
    assert cache.statistics().evicted == 1
    assert cache.find(segments(*"ab"), BOUNDARY, "owner", None, PAGES).reused_tokens == 600
    assert cache.find(segments(*"cd"), BOUNDARY, "owner", None, PAGES).reused_tokens == 300
    assert cache.find(segments(*"ce"), BOUNDARY, "owner", None, PAGES).reused_tokens == 600


def test_a_text_larger_than_the_cache_keeps_its_beginning() -> None:
    cache = a_cache(4 * 5_000)
    ask(cache, segments(*"abcdefgh"))
    assert ask(cache, segments(*"abcdefgh")).reused == 1_200


def test_an_owner_with_most_of_a_full_cache_evicts_its_own() -> None:
    cache = a_cache(10 * 5_000)
    ask(cache, segments("a", "b"), owner="small")
    for letter in "abcdefghijklmnopqrstuvwxyz":
        ask(cache, segments(letter, letter.upper()), owner="large")
    assert ask(cache, segments("a", "b"), owner="small").reused == 600


def test_a_thread_is_given_up_between_long_parts_alone() -> None:
    """Giving it up before the first part made each turn wait behind all long work of other keys."""
    given, cache = list[None](), a_cache(10 * MANY)
    token = turns.set(lambda: given.append(None))
    try:
        ask(cache, segments(*"abc"))
        ask(cache, segments(*"abcd"))
        assert not given
        ask(cache, segments(*"abcde" * (TURN_CHARACTERS // 300)))
        assert given
    finally:
        turns.reset(token)


def test_no_text_is_encoded_more_than_twice() -> None:
    cache, encode = a_cache(), Tokenizer()
    text = "".join([f"{'a' * 300}\1|" for _ in range(100)])  # each segment has the boundary's id for other text, too
    assert ask(cache, text, encode).tokens == ids(text)
    assert sum(map(len, encode.texts)) <= 2 * len(text) + 2 * len(encode.texts)


def test_the_segments_of_a_text_outlive_their_eviction() -> None:
    cache = a_cache()
    text = segments(*"abcdef") + "open"
    ask(cache, segments(*"abcd"))
    found = cache.find(text, BOUNDARY, "owner", None, PAGES)
    cache.clear()
    encode = Tokenizer()
    encoded = cache.complete(found, encode, MANY)
    assert (encoded.tokens, encoded.reused) == (ids(text), 1_200)
    assert [tuple(blocks.hashes) for blocks in encoded.blocks] == [block_hashes(ids(text), size) for size in PAGES]
    assert cache.find(text, BOUNDARY, "owner", None, PAGES).reused_tokens == 1_800, "its beginning is stored again"


def test_a_prompt_whose_end_is_replaced_by_the_answer_reuses_the_rest() -> None:
    """Qwen3.5's generation prompt opens a thought; in the next prompt the answer stands in its place."""
    cache = a_cache()
    history = "system" * 2_000 + "|"
    encoded = reused = 0
    for turn in range(40):
        history += f"user\nquestion {turn} {'x' * 500}|"
        prompt = f"{history}assistant\n<think>\n"
        outcome = ask(cache, prompt)
        assert outcome.tokens == ids(prompt)
        if turn > 20:
            reused, encoded = reused + outcome.reused, encoded + len(outcome.tokens)
        history += f"assistant\nanswer {turn}|"
    assert reused > 0.96 * encoded
    long = history + "y" * 30_000 + "|"
    ask(cache, long + "assistant\n<think>\n")
    outcome = ask(cache, long + "assistant\n" + "answer" * 50 + "|user\n" + "x" * 300 + "|assistant\n<think>\n")
    assert outcome.reused > 0.98 * len(outcome.tokens)


def test_a_text_of_boundaries_alone_costs_little_more_than_another() -> None:
    cache, encode = a_cache(), Tokenizer()
    marker = Boundary("<|im_end|>", ord("x"))

    def encode_markers(text: str) -> TokenIds:
        return encode(text.replace("<|im_end|>", "x"))

    text = "<|im_end|>" * 20_000
    encoded = cache.complete(cache.find(text, marker, "owner", None, PAGES[1:]), encode_markers, MANY)
    assert encoded.tokens == ids("x" * 20_000)
    assert sum(map(len, encode.texts)) == 20_000
    statistics = cache.statistics()
    assert statistics.segments <= len(text) // 256
    assert statistics.size_bytes < 3 * len(text)


def test_a_text_in_which_the_model_gives_the_id_itself_is_encoded_by_segments() -> None:
    """`\x01` has the id of the boundary here."""
    cache, encode = a_cache(), Tokenizer()
    text = segments("a", "\x01", "b") + "open"
    assert ask(cache, text, encode).tokens == ids(text)
    assert len(encode.texts) == 5
    assert ask(cache, text + "more").reused == 900
    assert cache.statistics().mismatches == 0


@pytest.mark.parametrize("lost", ["b|", "|b"])
def test_a_text_that_contradicts_the_rule_is_encoded_whole(lost: str) -> None:
    """The tokenizer takes some boundaries together with other characters."""
    cache = a_cache()
    ask(cache, segments("a"))
    text = segments("a", "b", "c")

    def encode(text: str) -> TokenIds:
        return ids(text.replace(lost, "xx"))

    encoded = cache.complete(cache.find(text, BOUNDARY, "owner", None, PAGES), encode, MANY)
    assert (encoded.tokens, encoded.reused) == (encode(text), 0)
    assert [tuple(blocks.hashes) for blocks in encoded.blocks] == [block_hashes(encode(text), size) for size in PAGES]
    statistics = cache.statistics()
    assert (statistics.mismatches, statistics.segments) == (1, 0)
    assert cache.find(text, BOUNDARY, "owner", None, PAGES).ends == (), "it is disabled"


def test_other_ids_than_those_of_the_whole_text_disable_a_cache() -> None:
    cache, encode = a_cache(), Tokenizer()
    text = segments("a", "b")
    encoded = ask(cache, text)
    found = cache.find(text, BOUNDARY, "owner", None, PAGES)
    cache.verify(text, BOUNDARY, encoded.tokens, encode)
    assert cache.statistics().segments
    cache.verify(text, BOUNDARY, ids(text[:-1]), encode)
    assert cache.complete(found, encode, MANY).reused == 0, "it was found before"
    assert ask(cache, text, encode).tokens == ids(text)
    assert encode.texts == [text] * 4
    statistics = cache.statistics()
    assert (statistics.segments, statistics.size_bytes, statistics.mismatches) == (0, 0, 1)


def test_a_cache_without_room_cuts_nothing() -> None:
    text, encode = segments("a", "b", "c"), Tokenizer()
    cache = a_cache(0)
    assert cache.find(text, BOUNDARY, "owner", None, PAGES).ends == ()
    assert ask(cache, text, encode).tokens == ids(text)
    assert (encode.texts, cache.statistics().evicted) == ([text], 0)


def test_a_short_text_is_not_cut() -> None:
    cache = a_cache()
    assert cache.find("a|" * 100, BOUNDARY, "owner", None, PAGES).ends == ()
    assert cache.find("a|" * 128, BOUNDARY, "owner", None, PAGES).ends == (256,)


def test_a_lone_surrogate_is_refused_as_in_the_whole_text() -> None:
    cache = a_cache()

    def encode(text: str) -> TokenIds:
        text.encode()
        return ids(text)

    found = cache.find(segments("a", "\ud800", "b"), BOUNDARY, "owner", None, ())
    with pytest.raises(UnicodeEncodeError):
        cache.complete(found, encode, MANY)
    assert cache.statistics().segments == 0


@pytest.mark.parametrize("page_sizes", [(), (16,), (1, 16, 64)])
@pytest.mark.parametrize(("owners", "letters"), [(1, 400), (100, 4), (300, 1)])
def test_the_bytes_are_those_of_the_memory(page_sizes: tuple[int, ...], owners: int, letters: int) -> None:
    cache = a_cache(10**9)
    tracemalloc.start()
    try:
        for owner in range(owners):
            ask(cache, segments(*map(chr, range(1_000, 1_000 + letters))), owner=str(owner), page_sizes=page_sizes)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.statistics().size_bytes == pytest.approx(used, rel=0.1)


def test_threads_share_a_cache() -> None:
    cache = a_cache(40_000)
    letters = "abcdefgh"
    wrong = list[str]()

    def work(owner: str, seed: int) -> None:
        for turn in range(60):
            text = segments(*letters[: 1 + (turn * seed) % 8]) + "open" * (turn % 3)
            encoded = ask(cache, text, owner=owner)
            same = [tuple(blocks.hashes) for blocks in encoded.blocks] == [
                block_hashes(ids(text), size) for size in PAGES
            ]
            if encoded.tokens != ids(text) or not same:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(owner, seed)) for owner, seed in (("a", 3), ("a", 5), ("b", 7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    statistics = cache.statistics()
    assert 0 < statistics.size_bytes <= 40_000
    assert statistics.reused_tokens > 0
    assert statistics.evicted > 0
    cache.clear()
    assert cache.statistics().size_bytes == 0
