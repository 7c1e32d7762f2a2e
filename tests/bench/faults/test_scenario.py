"""The runner of fault scenarios: what it prints and writes, when it fails; and the parts that several scenarios share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from threading import Event

import msgspec
import pytest

from bench.faults import growth
from bench.faults.growth import Sample
from bench.faults.scenario import Part, Run, Scenario, run
from bench.faults.slowdown import attacking, compare
from bench.faults.table import SCENARIOS
from bench.rig.result import Table, read


def done(tmp_path: Path, measure: Part, *words: str) -> tuple[int, Path]:
    """Run a scenario of one column with these words."""
    scenario = Scenario("A title", measure, ("name",), {"times": (3, "runs"), "kind": (("a", "b"), "which")})
    parser, out = argparse.ArgumentParser(), tmp_path / "out.json"
    scenario.add_options(parser)
    return run("name", scenario, parser.parse_args([*words, "--json", str(out)]), words), out


def empty(**options: object) -> Run:
    return Run(argparse.Namespace(only="", **options))


def test_a_scenario_without_anything_wrong_returns_0_and_writes_its_table(tmp_path: Path) -> None:
    code, out = done(tmp_path, lambda run: run.row(run.options.kind * run.options.times), "--kind", "b")
    document = read(out)
    assert (code, document.schema, document.command[2:4]) == (0, "espalier.bench.name/1", ["bench.faults", "name"])
    assert isinstance(document.figures[0], Table)
    assert document.figures[0].rows == [["bbb"]]


def broken(run: Run) -> None:
    run.row("x")
    raise RuntimeError("no node")


@pytest.mark.parametrize(
    ("measure", "sentence"),
    [
        (broken, "no node"),
        (lambda _: None, "nothing was measured"),
        (lambda run: (run.row("x"), run.check(0, "it was late")), "it was late"),
    ],
)
def test_a_scenario_fails_when_a_part_fails_or_nothing_was_measured(
    tmp_path: Path, measure: Part, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = done(tmp_path, measure)
    assert (code, f"{sentence}" in msgspec.json.decode(out.read_bytes())["wrong"][0]) == (1, True)
    assert "WRONG: " in capsys.readouterr().out


def test_a_part_that_fails_keeps_no_other_from_running_and_has_a_folder_of_its_own() -> None:
    folders = []

    def part(run: Run) -> None:
        folders.append(run.folder)
        broken(run)

    ran = empty()
    ran.options.only = "a part"
    ran.each({"a part": part, "a part more": part, "another": part})
    assert (len(ran.wrong), len({*folders}), [folder.exists() for folder in folders]) == (2, 2, [False, False])


def test_every_scenario_has_options_that_can_be_parsed() -> None:
    for name, scenario in SCENARIOS.items():
        parser = argparse.ArgumentParser()
        scenario.add_options(parser)
        assert {*scenario.options} < {*vars(parser.parse_args([]))}, name


# Growth ----------------------------------------------------------------------------------


def judged(*megabytes: float) -> list[str]:
    ran = empty()
    samples: list[tuple[int, Sample]] = [(100 * i, {("front", "MB"): size}) for i, size in enumerate(megabytes)]
    growth.judge(ran, samples, 100)
    assert len(ran.rows) == 1
    return ran.wrong


def test_what_grows_in_the_warm_up_alone_is_fine() -> None:
    assert judged(50.0, 90.0, 90.0, 90.2, 90.1) == []


def test_what_grows_on_is_wrong() -> None:
    assert judged(50.0, 90.0, 92.0, 94.0, 96.0) == ["MB of front grows by 20.0 a thousand requests"]


# A slowdown ------------------------------------------------------------------------------


@pytest.mark.parametrize(("beside", "wrong"), [(120.0, 0), (151.0, 1)])
def test_medians_are_compared_with_the_slowdown_that_is_allowed(beside: float, wrong: int) -> None:
    ran = empty(times=3)
    alone = iter([100.0, 1.0, 100.0])
    compare(ran, "them", lambda: next(alone), lambda: beside, 20.0)
    assert (len(ran.wrong), ran.rows[0][3]) == (wrong, 150.0)


def dies(_: Event) -> None:
    raise AssertionError("no such gateway")


def leaves(_: Event) -> None:
    """Attack for no time at all."""


@pytest.mark.parametrize("attack", [dies, leaves])
def test_an_attack_that_is_over_before_its_time_fails_the_run(attack: Callable[[Event], None]) -> None:
    begun = Event()

    def noted(over: Event) -> None:
        begun.set()
        attack(over)

    with pytest.raises(RuntimeError, match="the attack failed"), attacking(noted):
        assert begun.wait(10.0)
        Event().wait(0.1)


def test_an_attack_that_lasts_raises_nothing() -> None:
    with attacking(lambda over: over.wait()):
        pass
