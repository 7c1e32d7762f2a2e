"""Over several loads: the price of a request by itself, and that of a token over the clients."""

from __future__ import annotations

import pytest
from attrs import evolve

from bench.cost import trends
from bench.cost.sample import Load, Sample
from bench.load.messages import Api
from tests.bench.cost.samples import sample, spent

REQUESTS = 10


def costing(tokens: int, start: int = 0, request_us: float = 1000.0, clients: int = 64, api: Api = "chat") -> Sample:
    """Return a sample of a server whose request costs so much, and each token of it 20 us."""
    seconds = REQUESTS * (request_us + 20 * tokens) / 1e6
    load = Load(output_tokens=tokens, clients=clients, api=api)
    groups = {"node": spent(seconds), "scheduler": spent(7.0)}
    return sample(load, requests=REQUESTS, tokens=REQUESTS * tokens, groups=groups, start=start)


def test_a_request_and_a_token_are_priced_from_answers_of_two_lengths() -> None:
    assert trends.split([costing(16), costing(128)]) == pytest.approx((1000, 20))
    assert trends.split([costing(128), costing(128)]) is None


def test_each_start_is_split_by_itself() -> None:
    several = [costing(tokens, start, 1000.0 * (start + 1)) for start in (0, 1) for tokens in (128, 16)]
    (table,) = trends.split_tables("S", several)
    assert list(table.rows[0]) == ["chat, 64 clients", pytest.approx([1000, 2000]), pytest.approx([20, 20])]


def test_the_memory_of_a_client_is_the_growth_of_the_peak_over_the_clients_that_are_more() -> None:
    several = [
        sample(Load(clients=clients), groups={"node": evolve(spent(0.1), memory_max_mb=peak_mb)}, start=start)
        for start, peaks in enumerate(((50.0, 60.0), (51.0, 71.0)))
        for clients, peak_mb in zip((24, 1024), peaks, strict=True)
    ]
    (table,) = trends.memory_tables("S", several)
    assert [list(row) for row in table.rows] == [["1024 clients, 128 tokens, chat", "node", [10.24, 20.48]]]
    assert trends.memory_tables("S", several[:1]) == []


def test_a_load_with_no_more_clients_than_one_before_it_has_no_peak_of_its_own() -> None:
    several = [
        sample(Load(clients=clients), groups={"node": evolve(spent(0.1), memory_max_mb=peak_mb)})
        for clients, peak_mb in ((100, 60.0), (24, 60.0), (64, 60.0), (1124, 61.0))
    ]
    (table,) = trends.memory_tables("S", several)
    assert [list(row) for row in table.rows] == [["1124 clients, 128 tokens, chat", "node", [1.0]]]
