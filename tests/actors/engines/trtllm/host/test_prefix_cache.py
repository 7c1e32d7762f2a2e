"""A flush changes the salt of each later request, and no two requests of different periods or salts share one."""

from __future__ import annotations

from actors.engines.trtllm.host.prefix_cache import PrefixCache


def test_salts_are_kept_until_the_first_flush_and_differ_behind_each() -> None:
    cache, salts = PrefixCache(), list[str | None]()
    assert [cache.salt(own) for own in (None, "a")] == [None, "a"]
    for _ in range(12):
        salts += [cache.salt(own) for own in (None, "", "a")]
        cache.flush()
    # Without a salt and with an empty one a request is the same from the first flush on.
    assert len({*salts}) == 3 + 11 * 2


def test_a_reported_salt_is_that_of_the_requests_that_find_the_block_now() -> None:
    cache, salts = PrefixCache(), (None, "a", "1:a")
    assert [cache.own_salt(salt) for salt in salts] == [*salts]
    before = [cache.salt(own) for own in salts]
    cache.flush()
    assert [cache.own_salt(cache.salt(own)) for own in salts] == [*salts]
    assert not {cache.own_salt(salt) for salt in before[:2]} & {*salts}


def test_a_client_that_chooses_its_salt_finds_no_block_of_a_period() -> None:
    """A period's salt is no secret: its own salt would be another client's without one."""
    cache = PrefixCache()
    for _ in range(3):
        of_all = cache.salt(None)
        assert cache.salt(of_all) != of_all or of_all is None
        for guessed in ("flush:0/", "flush:1/", "flush:2/", "1:", "2:"):
            assert cache.salt(guessed) not in {cache.salt(None), None}
            assert cache.own_salt(cache.salt(guessed)) == guessed
        cache.flush()


def test_no_salt_of_a_client_is_that_of_another_period() -> None:
    """A block from before a release of memory has lost its contents."""
    cache, given = PrefixCache(), (None, "a", "1:", "1:a", "2:", "flush:0/", "flush:1/", "flush:1/a", "flush:2/")
    salts = list[str | None]()
    for _ in range(3):
        salts += [cache.salt(own) for own in given]
        cache.flush()
    assert len({*salts}) == len(salts)
