"""The summary of the repository, the table that is written from it, and what a new document changes of both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.__main__ import main
from bench.report import summary
from bench.rig import result
from tests.bench.cost.samples import sample, spent
from tests.bench.report.test_targets import versus

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def numbers(value: Any) -> list[float]:
    """Return all numbers of a row."""
    if isinstance(value, dict | list):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in numbers(each)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_the_page_has_the_figures_of_the_summary() -> None:
    entries, page = summary.read(), summary.PAGE.read_text()
    assert summary.replaced(page, summary.targets(entries)) == page, "run python -m bench report --keep"
    stated = {float(found.replace(",", "")) for found in NUMBER.findall(page)}
    for entry in entries:
        assert "target" in entry.rows[0] or set(numbers(entry.rows)) <= stated, entry.name


def test_the_summary_is_short_and_written_as_it_is_read() -> None:
    text = summary.FILE.read_text()
    assert summary.text(summary.read()) == text
    assert len(text.splitlines()) < 300


def test_a_new_document_replaces_its_entry_and_the_page_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(summary, "FILE", tmp_path / "summary.json")
    monkeypatch.setattr(summary, "PAGE", tmp_path / "page.md")
    other = summary.Entry(name="other", date="", commit=None, machine="", command="", rows=[{"x": 1}])
    summary.FILE.write_text(summary.text([other]))
    summary.PAGE.write_text(f"before\n{summary.FIRST}\nold\n{summary.LAST}\nafter\n")
    theirs = [sample(groups={"node": spent(0.1)})] * 3
    ours = [sample(groups={"node": spent(0.1 * share)}) for share in (0.20, 0.21, 0.30)]
    written = msgspec.structs.replace(versus(theirs, ours), command=["python", "-m", "bench", "versus", "sglang"])
    result.write(tmp_path / "versus-sglang.json", written)
    for _ in range(2):
        assert main(["report", str(tmp_path / "versus-sglang.json"), "--keep"]) == 0
    price = "| 100 | 21 (20 to 30) | 0.21 (0.20 to 0.30) | <= 0.22 x SGLang's server | met |"
    assert price in capsys.readouterr().out
    page = summary.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert price in page
    assert "| 1 | >= 1.15 x SGLang's server | 0.87 times the target |" in page
    assert "- versus-sglang: 2026-11-23, 2 cores" in page
    assert [each.name for each in summary.read()] == ["other", "versus-sglang"]
