"""The value of each kind of target, from results that nobody measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from attrs import asdict, evolve

from bench.cost.accounts import Spent
from bench.cost.sample import Load, Sample
from bench.figures import kept, targets
from bench.figures.targets import TARGETS, Found, Target
from bench.load.messages import Api
from bench.rig.result import Table, write_document
from bench.versus.ratios import FIGURES
from tests.bench.cost.samples import sample, spent


def cost(folder: Path, name: str, samples: Sequence[Sample], *words: str) -> kept.Kept:
    begun = datetime(2026, 11, 23, tzinfo=UTC)
    plain = [asdict(each) for each in samples]
    write_document(folder / f"{name}.json", ("cost", *words), begun, title="T", notes=(), figures=(), samples=plain)
    return kept.read(folder / f"{name}.json")


def test_a_target_has_one_limit_and_every_row_a_name_of_its_own() -> None:
    assert all((target.most is None) != (target.least is None) for target in TARGETS)
    rows = [(target.what, target.unit) for target in TARGETS]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(("values", "met"), [([0.9, 1.0, 9.0], True), ([0.9, 1.1, 1.1], False)])
def test_the_median_decides(values: list[float], met: bool) -> None:
    target = Target(what="w", result="r", find=lambda _: Found(values), most=1.0)
    assert target.met(values) == met
    assert evolve(target, most=None, least=1.05).met(values) != met


def test_of_a_longest_gap_and_a_steepest_rise_the_worst_decides() -> None:
    target = Target(what="w", result="r", find=lambda _: Found(()), most=1.0, worst=True)
    assert not target.met([0.9, 0.9, 1.1])
    assert target.met([0.9, 1.0])
    assert not evolve(target, most=None, least=1.0).met([0.9, 1.1, 1.1])
    assert {each.what.partition(",")[0] for each in TARGETS if each.worst} == {
        "longest gap beyond the engine's step",
        "steepest rise of the CPU time a token from 1 to 8",
    }


def curve(api: Api, *prices: float) -> list[Sample]:
    """Return samples of these prices of a token, at 1 client and more."""
    return [
        sample(Load(api=api, clients=clients), groups={"node": spent(us / 1000)})
        for clients, us in zip(targets.CURVE, prices, strict=False)
    ]


def test_the_steepest_rise_is_of_the_medians_of_each_api(tmp_path: Path) -> None:
    samples = [*curve("chat", 90, 45, 54, 50, 40), *curve("responses-ws", 80, 40, 20, 10, 5)]
    assert targets.steepest(cost(tmp_path, "clients", samples)).values == pytest.approx([1.2, 0.5])


def test_there_is_no_steepest_rise_where_a_number_of_clients_was_not_measured(tmp_path: Path) -> None:
    samples = [*curve("chat", 90, 45, 54, 50, 40), *curve("responses-ws", 80, 40)]
    assert targets.steepest(cost(tmp_path, "clients", samples)) == Found(())


def test_ratios_of_some_of_the_rounds_decide_nothing(tmp_path: Path) -> None:
    """A peer that had no gap in a round is no reason to judge by the other rounds alone."""
    theirs = [evolve(sample(), gap_p99_ms=gap) for gap in (4.0, 0.0)]
    path, begun = tmp_path / "v.json", datetime(2026, 11, 23, tzinfo=UTC)
    sides = {"theirs": [asdict(each) for each in theirs], "ours": [asdict(sample())] * 2}
    write_document(path, ("versus",), begun, title="T", notes=(), figures=(), samples=sides)
    found = targets.Ratio(FIGURES["gap p99 ms"], api="chat", clients=64)(kept.read(path))
    assert found == Found([], [4.0, 0.0], [9.0, 9.0])


def test_a_request_of_two_gateways_is_priced_by_their_nodes_alone() -> None:
    one = sample(requests=10, groups={"node front": spent(0.02), "node worker-0": spent(9.0), "launcher": spent(1.0)})
    two = evolve(one, groups={"node front-0": spent(0.01), "node front-1": spent(0.02), "node worker-0": spent(1.0)})
    assert targets.gateway_us(one) == pytest.approx(2000)
    assert targets.gateway_us(two) == pytest.approx(3000)


def test_the_busier_of_two_gateways_is_compared_with_an_equal_share(tmp_path: Path) -> None:
    groups = {"node front-0": spent(3.0), "node front-1": spent(1.0), "node worker-0": spent(9.0)}
    found = cost(tmp_path, "gateways", [sample(groups=groups)])
    assert targets.busiest_share(found).values == [1.5]


@pytest.mark.parametrize(("words", "beyond_ms"), [(("--step-ms", "50"), 250.0), ((), 294.0)])
def test_the_longest_gap_counts_from_the_engines_step_also_if_most_gaps_are_longer(
    words: tuple[str, ...], beyond_ms: float, tmp_path: Path
) -> None:
    slow = evolve(sample(Load(api="responses-ws", clients=1000)), gap_max_ms=300.0, gap_p50_ms=200.0)
    other = sample(Load(api="chat", clients=1000))
    assert targets.Gap(1000)(cost(tmp_path, "streams", [slow, other], *words)).values == [beyond_ms]


def test_the_memory_of_a_stream_is_of_the_gateways_node(tmp_path: Path) -> None:
    def node(peak_mb: float) -> dict[str, Spent]:
        return {"node front": evolve(spent(1.0), memory_max_mb=peak_mb)}

    apis: tuple[Api, ...] = ("responses-ws", "chat")
    samples = [
        sample(Load(api=api, clients=n), groups=node(peak))
        for api, n, peak in ((apis[0], 24, 50.0), (apis[0], 1048, 110.0), (apis[1], 1048, 110.0))
    ]
    assert targets.ClientMemory(1048)(cost(tmp_path, "streams", samples)).values == [60.0]


def test_figures_of_a_documents_own_table_are_taken_by_their_row(tmp_path: Path) -> None:
    table = Table(title=targets.ADDED, columns=("", "a", "b", "c"), rows=[["gap", [4.0], [5.0], [1.25]]])
    path, begun = tmp_path / "added-latency.json", datetime(2026, 11, 23, tzinfo=UTC)
    write_document(path, ("x",), begun, title="T", notes=(), figures=[table], samples=None)
    assert targets.of_table(targets.ADDED, "gap")(kept.read(path)) == Found([1.25], [4.0], [5.0])
    with pytest.raises(KeyError):
        targets.of_table("other", "gap")(kept.read(path))
