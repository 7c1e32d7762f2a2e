"""The figures of the page on performance, and the results that they are written from."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from attrs import asdict

from bench.__main__ import main
from bench.cost.sample import Load, Sample
from bench.figures import kept, pages
from bench.figures.pages import NoMarks, marks
from bench.figures.plots import plots
from bench.figures.routing_tables import tables
from bench.figures.targets import TARGETS
from bench.rig.result import write_document
from bench.versus.ratios import ROUNDS_NOTE
from tests.bench.cost.samples import sample, spent
from tests.bench.figures.routing import DATA

BEGIN, END = marks()
CHAT_64 = Load(api="chat", clients=64, output_tokens=128)


def priced(us_a_token: float, load: Load = CHAT_64) -> Sample:
    return sample(load, groups={"node": spent(us_a_token * 1000 / 1e6)})


def versus(folder: Path, name: str, ratios: Sequence[float], load: Load = CHAT_64) -> None:
    """Write a result of `versus` with these ratios of the price of a token, the peer's being 100 us."""
    samples = {
        "theirs": [asdict(priced(100.0, load))] * len(ratios),
        "ours": [asdict(priced(100 * r, load)) for r in ratios],
    }
    words, begun = ("versus", "sglang", "--rounds", str(len(ratios))), datetime(2026, 11, 23, tzinfo=UTC)
    write_document(folder / f"{name}.json", words, begun, title="T", notes=(), figures=(), samples=samples)


def empty_pages(root: Path) -> None:
    """Write pages that have the marks of all tables alone."""
    (root / "docs").mkdir()
    places = "".join(f"{first}\n{last}\n" for first, last in map(marks, ("figures", *tables(DATA))))
    (root / "docs" / "performance.md").write_text(places)


def test_the_pages_have_the_figures_of_the_kept_results() -> None:
    assert main(["figures", "--check"]) == 0


def test_a_page_that_differs_is_named_and_then_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    routing = "".join(f"{first}\n{last}\n" for first, last in map(marks, tables(DATA)))
    page.write_text(f"before\n{routing}{BEGIN}\nold\n{END}\nafter\n")
    versus(tmp_path, "versus-sglang", [0.20, 0.21, 0.30])
    words = ["figures", "--results", str(tmp_path), "--root", str(tmp_path)]
    assert main([*words, "--check"]) == 1
    assert f"{page} differs" in capsys.readouterr().err
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| 100 | 21 (20 to 30) | 0.21 (0.20 to 0.30) | <= 0.22 x SGLang's server | met |" in text
    assert text.count(pages.NOT_MEASURED) == len(TARGETS) - 2
    (origin,) = (line for line in text.splitlines() if line.startswith("- [versus-sglang](../bench/results/"))
    assert "2026-11-23" in origin
    assert ", load " in origin
    assert "`python -m bench versus sglang --rounds 3`" in origin


def test_a_missed_target_says_by_how_much(tmp_path: Path) -> None:
    versus(tmp_path, "versus-sglang", [0.40, 0.44, 0.50])
    text = pages.table(kept.read_all(tmp_path), "../bench/results")
    assert "| 0.44 (0.40 to 0.50) | <= 0.22 x SGLang's server | **missed**: 2 times the target |" in text
    assert "| 1 | >= 1.15 x SGLang's server | **missed**: 0.87 times the target |" in text


def test_the_origin_of_a_figure_has_the_doubts_about_it(tmp_path: Path) -> None:
    begun = datetime(2026, 11, 23, tzinfo=UTC)
    sides = {"theirs": [asdict(priced(100.0))], "ours": [asdict(priced(20.0))]}
    notes = (f"{ROUNDS_NOTE}1; starts of both servers: 1", "SATURATED: a process of the load used 99% of a core")
    path = tmp_path / "versus-sglang.json"
    write_document(path, ("versus", "sglang"), begun, title="T", notes=notes, figures=(), samples=sides)
    assert kept.origin(kept.read(path)).endswith(f"`python -m bench versus sglang`; {notes[1]}")


def test_a_page_without_marks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoMarks):
        pages.replaced("no marks", "figures")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").touch()
    with pytest.raises(SystemExit):
        main(["figures", "--results", str(tmp_path), "--root", str(tmp_path)])
    assert BEGIN in capsys.readouterr().err


def test_plots_are_drawn_beside_the_page_on_performance(tmp_path: Path) -> None:
    empty_pages(tmp_path)
    wanted = pages.pages({}, tmp_path, DATA)
    assert wanted[tmp_path / "docs" / "plots" / "choice-time.svg"] == plots(DATA)["choice-time.svg"]
    assert all(table in wanted[tmp_path / "docs" / "performance.md"] for table in tables(DATA).values())


def test_a_plot_that_is_missing_is_named_and_then_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty_pages(tmp_path)
    words, plot = ["figures", "--root", str(tmp_path)], tmp_path / "docs" / "plots" / "hit-shares.svg"
    assert main([*words, "--check"]) == 1
    assert f"{plot} differs" in capsys.readouterr().err
    assert not plot.exists()
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    plot.write_text(plot.read_text().replace("kv", "other"))
    assert main([*words, "--check"]) == 1
