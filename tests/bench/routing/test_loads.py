"""Loads share the beginnings that they are to share, and depend on their seed alone."""

from __future__ import annotations

import pytest

from bench.routing.loads import BLOCK_WORDS, PREFIX_WORDS, REQUESTS, load


def test_a_load_depends_on_its_seed_alone_and_its_size_on_the_scale() -> None:
    for name, count in REQUESTS.items():
        assert load(name, 3, scale=0.1) == load(name, 3, scale=0.1)
        assert load(name, 3, scale=0.1).requests[5].prompt != load(name, 4, scale=0.1).requests[5].prompt
        assert [each.number for each in load(name, 0, scale=0.05).requests] == list(range(max(8, count // 20)))


def test_shared_prompts_have_eight_beginnings_for_each_engine() -> None:
    requests = load("shared", 0, engines=3).requests
    assert len({tuple(each.prompt.split()[:PREFIX_WORDS]) for each in requests}) == 24
    assert all(10 <= len(each.prompt.split()) - PREFIX_WORDS <= 30 for each in requests)


def test_a_conversation_of_the_trace_grows_and_shares_whole_blocks() -> None:
    requests = load("trace", 0).requests
    blocks = [each.prompt.split()[: 2 * BLOCK_WORDS] for each in requests]
    assert len({tuple(each) for each in blocks}) == 4, "system prompts"
    assert max(len(each.prompt.split()) for each in requests) > 4 * BLOCK_WORDS
    assert [each.at_s for each in requests] == pytest.approx([0.05 * number for number in range(len(requests))])


def test_arrivals_have_the_asked_rate_and_no_client_waits() -> None:
    paced = load("paced", 0).at_rate(10.0, 0)
    times = [each.at_s or 0.0 for each in paced.requests]
    assert paced.clients is None
    assert times == sorted(times)
    assert times[-1] == pytest.approx(len(times) / 10, rel=0.2)
