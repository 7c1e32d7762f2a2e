"""The rate limit of a key: at most its burst and its rate, whatever the clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from supervisor.gateway.keys.token_bucket import TokenBucket

rates = st.floats(0.001, 1e4)
waits = st.lists(st.floats(0, 100), max_size=60)


@given(rates, st.integers(1, 50), waits)
def test_a_bucket_never_gives_more_than_its_burst_and_its_rate(rate: float, burst: int, pauses: list[float]) -> None:
    now, given_at = 0.0, []
    bucket = TokenBucket.full(rate, burst, now)
    for pause in pauses:
        now += pause
        if bucket.take(now) == 0:
            given_at.append(now)
    for first in range(len(given_at)):
        for last in range(first, len(given_at)):
            assert last - first + 1 <= (burst + rate * (given_at[last] - given_at[first])) * (1 + 1e-9) + 1e-9


@given(rates, st.integers(1, 50), waits)
def test_the_wait_that_a_bucket_returns_is_long_enough(rate: float, burst: int, pauses: list[float]) -> None:
    now = 0.0
    bucket = TokenBucket.full(rate, burst, now)
    for pause in pauses:
        now += pause
        wait = bucket.take(now)
        assert 0 <= wait <= 1 / rate
        if wait:
            now += wait * (1 + 1e-9) + 1e-9
            assert bucket.take(now) == 0


def test_a_clock_that_stands_still_or_goes_back_adds_no_token() -> None:
    bucket = TokenBucket.full(1.0, 2, 100.0)
    assert [bucket.take(now) for now in (100, 100)] == [0, 0]
    assert bucket.take(100) == 1
    assert bucket.take(50) == 1
    assert bucket.take(101) == 0
