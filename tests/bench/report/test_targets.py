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
from bench.cost.sample import Load, Sample
from bench.load.messages import Api
from bench.report import targets
from bench.report.targets import TARGETS, Found, Target
from bench.rig.node import ROOT
from bench.rig.result import Result, Table
from bench.turns.driving import Load as Session
from bench.turns.report import ratio_tables
from bench.versus.ratios import FIGURES
from tests.bench.cost.samples import sample, spent
from tests.bench.turns import samples as turns_samples


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


def test_the_price_of_an_agents_turn_is_that_of_the_turns_behind_the_first() -> None:
    load = Session(tokens=45_000)
    pair = (turns_samples.sample(load, 0.2, 0.02, 0.02), turns_samples.sample(load, 0.1, 0.01, 0.01))
    (target,) = (each for each in TARGETS if each.result == "turns-45k")
    found = target.find(document(figures=ratio_tables("Dynamo", "Espalier", [pair, pair])))
    assert found.values == pytest.approx([0.5, 0.5])
    assert found.ours == pytest.approx([10, 10])


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
