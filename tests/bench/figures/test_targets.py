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


def test_the_steepest_rise_is_of_the_medians_of_each_api(tmp_path: Path) -> None:
    prices: dict[tuple[Api, int], float] = {
        ("chat", 1): 90,
        ("chat", 8): 45,
        ("chat", 64): 54,
        ("responses-ws", 1): 80,
        ("responses-ws", 8): 40,
    }
    samples = [
        sample(Load(api=api, clients=clients), groups={"node": spent(us / 1000)})
        for (api, clients), us in prices.items()
    ]
    assert targets.steepest(cost(tmp_path, "clients", samples)).values == pytest.approx([1.2, 0.5])


def test_the_busier_of_two_gateways_is_compared_with_an_equal_share(tmp_path: Path) -> None:
    groups = {"node front-0": spent(3.0), "node front-1": spent(1.0), "node worker-0": spent(9.0)}
    found = cost(tmp_path, "gateways", [sample(groups=groups)])
    assert targets.busiest_share(found).values == [1.5]


@pytest.mark.parametrize(("words", "beyond_ms"), [(("--step-ms", "50"), 250.0), ((), 294.0)])
def test_the_longest_gap_counts_from_the_engines_step_also_if_most_gaps_are_longer(
    words: tuple[str, ...], beyond_ms: float, tmp_path: Path
) -> None:
    slow = evolve(sample(Load(clients=1000)), gap_max_ms=300.0, gap_p50_ms=200.0)
    assert targets.Gap(1000)(cost(tmp_path, "streams", [slow], *words)).values == [beyond_ms]


def test_the_memory_of_a_stream_is_of_the_gateways_node(tmp_path: Path) -> None:
    def node(peak_mb: float) -> dict[str, Spent]:
        return {"node front": evolve(spent(1.0), memory_max_mb=peak_mb)}

    samples = [sample(Load(clients=n), groups=node(peak)) for n, peak in ((24, 50.0), (1048, 110.0))]
    assert targets.ClientMemory(1048)(cost(tmp_path, "streams", samples)).values == [60.0]


def test_figures_of_a_documents_own_table_are_taken_by_their_row(tmp_path: Path) -> None:
    table = Table(title=targets.ADDED, columns=("", "a", "b", "c"), rows=[["gap", [4.0], [5.0], [1.25]]])
    path, begun = tmp_path / "added-latency.json", datetime(2026, 11, 23, tzinfo=UTC)
    write_document(path, ("x",), begun, title="T", notes=(), figures=[table], samples=None)
    assert targets.of_table(targets.ADDED, "gap")(kept.read(path)) == Found([1.25], [4.0], [5.0])
    with pytest.raises(KeyError):
        targets.of_table("other", "gap")(kept.read(path))
