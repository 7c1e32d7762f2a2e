"""The signatures of TensorRT-LLM by version: which are held, and which one a running version has."""

from __future__ import annotations

import pytest

from actors.engines.trtllm.signatures import (
    CAPACITY,
    COLLECTIVE_RPC,
    GENERATE,
    HANDED,
    SAMPLING,
    SCHEDULING,
    SINCE,
    TABLE,
    VERSIONS,
    Signatures,
    Version,
)


@pytest.mark.parametrize(
    ("running", "column"),
    [
        ("1.0", "1.0"),
        ("1.0.0", "1.0"),
        ("1.1.0rc5", "1.0"),
        ("1.2.0rc3", "1.0"),
        ("1.2.0", "1.2"),
        ("1.2.1", "1.2"),
        ("1.3.0rc21", "1.2"),
        ("1.3.0rc29", "1.3.0rc29"),
        ("1.3.0rc29.post1", "1.3.0rc29"),
        ("1.3.0", "1.3.0rc29"),
        ("1.4.0rc1", "1.3.0rc29"),
    ],
)
def test_a_version_has_the_signatures_of_the_newest_that_is_not_newer(running: str, column: str) -> None:
    assert Signatures.of(running).column == column


@pytest.mark.parametrize("running", ["1.0.0rc4", "0.21.0", "", "main", "x" * 200])
def test_an_older_version_or_none_is_refused(running: str) -> None:
    with pytest.raises(ValueError, match=r"older than|is no version") as refused:
        Signatures.of(running)
    assert len(str(refused.value)) < 120


def test_versions_are_held_in_their_order() -> None:
    versions = [Version.of(each) for each in VERSIONS]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize(
    ("callee", "name", "since"),
    [
        (GENERATE, "disaggregated_params", "1.0"),
        (GENERATE, "cache_salt", "1.2"),
        (GENERATE, "scheduling_params", "1.2"),
        (GENERATE, "priority", "1.3.0rc29"),
        (GENERATE, "trace_headers", "1.3.0rc29"),
        (SAMPLING, "prompt_ignore_length", "1.3.0rc29"),
        (HANDED, "disagg_request_id", "1.3.0rc29"),
    ],
)
def test_a_parameter_is_there_from_its_version_on(callee: str, name: str, since: str) -> None:
    has = [version for version in VERSIONS if Signatures.of(version).has(callee, name)]
    assert has == [*VERSIONS[VERSIONS.index(since) :]]


@pytest.mark.parametrize(("callee", "since"), [(GENERATE, "1.0"), (SCHEDULING, "1.2"), (CAPACITY, "1.3.0rc29")])
def test_a_call_is_there_from_its_version_on(callee: str, since: str) -> None:
    holds = [version for version in VERSIONS if Signatures.of(version).holds(callee)]
    assert holds == [*VERSIONS[VERSIONS.index(since) :]]


def test_no_parameter_is_older_than_its_call_and_none_is_named_twice() -> None:
    assert SINCE.keys() <= TABLE.keys()
    for callee, parameters in TABLE.items():
        names = [each.name for each in parameters]
        assert len({*names}) == len(names), callee
        first = VERSIONS.index(SINCE.get(callee, VERSIONS[0]))
        assert all(VERSIONS.index(each.since) >= first for each in parameters), callee


def test_unknown_names_are_found() -> None:
    assert Signatures.of("1.0").unknown(GENERATE, ["inputs", "cache_salt", "priority"]) == {"cache_salt", "priority"}
    assert not Signatures.of("1.3.0rc29").unknown(COLLECTIVE_RPC, ["method", "args", "kwargs", "non_block"])
