"""The value of each kind of target, from documents of loads that were not sent, and the parts that measure them."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
from attrs import asdict, evolve

from bench.__main__ import COMMANDS
from bench.cost.accounts import Spent
from bench.cost.sample import Load, Sample
from bench.load.messages import Api
from bench.report import targets
from bench.report.targets import TARGETS, Found, Target
from bench.rig.node import ROOT
from bench.rig.result import Result, Table
from bench.versus.ratios import FIGURES
from tests.bench.cost.samples import sample, spent


def document(samples: Any = None, *words: str, figures: Sequence[Table] = ()) -> Result:
    return Result(
        schema="s",
        title="T",
        command=words,
        begun_at="2026-11-23T00:00:00",
        versions={"commit": "abc"},
        machine={"cores": 2},
        figures=figures,
        samples=samples,
    )


def cost(samples: Sequence[Sample], *words: str) -> Result:
    return document([asdict(each) for each in samples], *words)


def versus(theirs: Sequence[Sample], ours: Sequence[Sample]) -> Result:
    return document({"theirs": [asdict(each) for each in theirs], "ours": [asdict(each) for each in ours]})


@pytest.mark.parametrize(("values", "met"), [([0.9, 1.0, 9.0], True), ([0.9, 1.1, 1.1], False)])
def test_the_median_decides_or_the_worst(values: list[float], met: bool) -> None:
    target = Target("r", "w", lambda _: Found(values), 1.0, " x")
    assert target.met(values) == met
    assert evolve(target, limit=1.05, at_least=True).met(values) != met
    assert not evolve(target, worst=True).met(values)


def test_a_ratio_is_of_one_round_and_of_all_rounds_or_none() -> None:
    found = targets.ratio(FIGURES["gap p99 ms"], "chat", 64)(versus([sample()] * 2, [sample()] * 2))
    assert found == Found([1.0, 1.0], [9.0, 9.0], [9.0, 9.0])
    theirs = [evolve(sample(), gap_p99_ms=gap) for gap in (4.0, 0.0)]
    found = targets.ratio(FIGURES["gap p99 ms"], "chat", 64)(versus(theirs, [sample()] * 2))
    assert found == Found([], [4.0, 0.0], [9.0, 9.0])


def curve(api: Api, *prices: float) -> list[Sample]:
    """Return samples of these prices of a token, at 1 client and more."""
    return [
        sample(Load(api=api, clients=clients), groups={"node": spent(us / 1000)})
        for clients, us in zip(targets.CURVE, prices, strict=False)
    ]


def test_the_steepest_rise_is_of_the_medians_of_each_api_if_all_was_measured() -> None:
    samples = [*curve("chat", 90, 45, 54, 50, 40), *curve("responses-ws", 80, 40, 20, 10, 5)]
    assert targets.steepest(cost(samples)).values == pytest.approx([1.2, 0.5])
    assert targets.steepest(cost(samples[:-1])) == Found(())


def test_gateways_are_priced_by_their_nodes_alone_and_the_busier_by_an_equal_share() -> None:
    one = sample(requests=10, groups={"node front": spent(0.02), "node worker-0": spent(9.0), "launcher": spent(1.0)})
    two = evolve(one, groups={"node front-0": spent(0.03), "node front-1": spent(0.01), "node worker-0": spent(1.0)})
    assert [targets.gateway_us(each) for each in (one, two)] == pytest.approx([2000, 4000])
    assert targets.busiest_share(cost([two])).values == pytest.approx([1.5])


@pytest.mark.parametrize(("words", "beyond_ms"), [(("--step-ms", "50"), 250.0), ((), 294.0)])
def test_the_longest_gap_counts_from_the_engines_step(words: tuple[str, ...], beyond_ms: float) -> None:
    slow = evolve(sample(Load(api="responses-ws", clients=1000)), gap_max_ms=300.0, gap_p50_ms=200.0)
    assert targets.longest_gap(cost([slow, sample(Load(clients=1000))], *words)).values == [beyond_ms]


def test_the_memory_of_a_stream_is_of_the_gateways_node() -> None:
    def node(peak_mb: float) -> dict[str, Spent]:
        return {"node front": evolve(spent(1.0), memory_max_mb=peak_mb)}

    samples = [sample(Load(api="responses-ws", clients=n), groups=node(peak)) for n, peak in ((24, 50), (1048, 110))]
    assert targets.client_memory(1048)(cost(samples)).values == [60.0]


def test_figures_of_a_documents_own_table_are_taken_by_their_row() -> None:
    table = Table(title=targets.ADDED, columns=("", "a", "b", "c"), rows=[["gap", [4.0], [5.0], [1.25]]])
    assert targets.of_table(targets.ADDED, "gap")(document(figures=[table])) == Found([1.25], [4.0], [5.0])
    with pytest.raises(KeyError):
        targets.of_table("other", "gap")(document(figures=[table]))


# The parts of `make bench` and `make bench-full` ------------------------------------------

PARTS = dict(re.findall(r"^\$\(call part, ([^,]+), (.+)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
ELSEWHERE = "added-latency"  # it asks an engine's host, which a bench may not import


def test_every_part_is_a_command_that_is_accepted() -> None:
    for name, text in PARTS.items():
        command, *words = shlex.split(text)
        parser = argparse.ArgumentParser()
        import_module(COMMANDS[command][0]).add(parser)
        parser.parse_args([*words, "--json", f"build/bench/{name}.json"])


def test_each_target_has_a_part_that_measures_it() -> None:
    assert {target.result for target in TARGETS} - {ELSEWHERE} <= PARTS.keys()
    rows = [(target.result, target.what) for target in TARGETS]
    assert len(set(rows)) == len(rows)
