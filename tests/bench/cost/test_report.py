"""The tables of `cost`: prices of a token and of a request, the scheduler apart."""

from __future__ import annotations

import pytest
from attrs import evolve

from bench.cost import report
from bench.cost.sample import Load, Sample
from tests.bench.cost.samples import sample, spent


def rows(samples: list[Sample]) -> dict[str, dict[str, object]]:
    table = report.tables("A server", samples)[0]
    return {str(row[0]): dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}


def test_a_token_costs_its_groups_cpu_over_the_tokens() -> None:
    one = sample(tokens=1000, requests=10, groups={"node": spent(0.08, 0.02), "scheduler": spent(0.5, 0.0)})
    found = rows([one])
    assert list(found) == ["node", "scheduler", report.OUTSIDE, report.EVERYTHING]
    assert found["node"]["us a token"] == [pytest.approx(100)]
    assert found["node"]["user"] == [pytest.approx(80)]
    assert found["node"]["us a request"] == [pytest.approx(10_000)]
    assert found[report.OUTSIDE]["us a token"] == [pytest.approx(100)]
    assert found[report.EVERYTHING]["us a token"] == [pytest.approx(600)]


def test_answers_of_one_token_have_no_gaps() -> None:
    names = [row[0] for row in report.tables("S", [sample(load=Load(output_tokens=1))])[1].rows]
    assert names == [name for name in report.SEEN if "gap" not in name]


@pytest.mark.parametrize(
    ("doubtful", "words"),
    [
        (evolve(sample(), client_share=0.9), "SATURATED: a process of the load used 90% of a core"),
        (evolve(sample(), ended=2), "2 processes of the server ended"),
        (sample(), "starts: 1;"),
        (sample(), "OTHER LENGTHS: in 1 of 1 loads"),
    ],
)
def test_a_doubtful_figure_has_a_warning(doubtful: Sample, words: str) -> None:
    assert any(words in line for line in report.warnings([doubtful]))


def test_three_starts_of_a_client_that_was_not_busy_have_no_warning() -> None:
    assert report.warnings([evolve(sample(tokens=1280), start=start) for start in range(3)]) == []
