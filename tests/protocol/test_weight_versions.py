"""Versions announced before tokens: each token has the last version before it, and nothing else is claimed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.weight_versions import VERSIONS_MAX, VersionRecord


def recorded(*announced: tuple[str, int]) -> VersionRecord:
    record = VersionRecord()
    for version, tokens in announced:
        record.announce(version, tokens)
    return record


def test_an_answer_of_one_version_has_one_span() -> None:
    assert recorded(("one", 0)).spans(5) == (("one", 5),)
    assert recorded(("one", 0), ("one", 3)).spans(5) == (("one", 5),)


def test_a_split_is_where_the_new_version_was_announced() -> None:
    assert recorded(("one", 0), ("two", 3), ("one", 4)).spans(6) == (("one", 3), ("two", 1), ("one", 2))


def test_a_version_without_a_token_is_not_there() -> None:
    record = recorded(("one", 0), ("two", 3), ("three", 3))
    assert record.spans(5) == (("one", 3), ("three", 2))
    assert record.spans(3) == (("one", 3),), "cut at a stop string"
    assert recorded(("one", 0), ("two", 3), ("one", 3)).spans(5) == (("one", 5),)
    assert recorded(("one", 0), ("two", 0)).spans(5) == (("two", 5),)
    assert recorded(("one", 0)).spans(0) == ()


def test_a_version_that_is_not_known_is_empty() -> None:
    assert recorded().spans(5) == ()
    assert recorded(("", 0)).spans(5) == ()
    assert recorded(("", 0), ("two", 3)).spans(5) == (("", 3), ("two", 2))
    assert recorded(("one", 0), ("", 3)).spans(5) == (("one", 3), ("", 2))


def test_of_very_many_versions_the_last_are_kept() -> None:
    spans = recorded(*((str(place), place) for place in range(100))).spans(100)
    assert spans == tuple((str(place), 1) for place in range(100 - VERSIONS_MAX, 100))


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(0, 4)), max_size=20), st.integers(0, 90))
def test_each_token_has_the_last_version_before_it(changes: list[tuple[str, int]], end: int) -> None:
    record, each, at, last = VersionRecord(), list[str](), 0, ""
    for version, more in changes:
        record.announce(version, at)
        assert record.last == version
        last, at = version, at + more
        each += [version] * more
    each = (each + [last] * 90)[:end]
    spans = record.spans(end)
    assert [version for version, count in spans for _ in range(count)] in ([], each)
    assert bool(spans) is any(each)
