"""The form of documents, and statistics of their samples."""

from __future__ import annotations

import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.rig import result
from bench.rig.result import Table

ROWS = (("a", [1.0, 2.0]), ("b", None), ("c", "none"), ("d", 3.0))
FIGURES = (Table(title="T", columns=("", "us"), rows=ROWS),)


def test_a_document_is_read_as_it_was_written_whatever_else_stands_in_it(tmp_path: Path) -> None:
    about = result.about(("cost", "--url", "u"), datetime.now(UTC))
    document = {"schema": "s/1", "title": "T", **about, "figures": FIGURES, "own": {"more": [1]}}
    result.write(tmp_path / "a.json", document)
    read = result.read(tmp_path / "a.json")
    assert read.command == ["python", "-m", "bench", "cost", "--url", "u"]
    assert msgspec.json.encode(read.figures) == msgspec.json.encode(FIGURES)
    assert (read.schema, read.title) == ("s/1", "T")


def test_a_document_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    result.write(path, {"first": 1})

    def fails(part: Path, _: bytes) -> int:
        part.touch()
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(OSError, match="no space"):
        result.write(path, {"second": 2})
    assert msgspec.json.decode(path.read_bytes()) == {"first": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_document_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "a.json")
    result.check_writable(link)
    assert link.is_symlink()
    assert not link.exists()
    result.write(link, {})
    assert link.is_symlink()
    assert link.read_bytes() == (tmp_path / "a.json").read_bytes() == b"{}\n"
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    result.write(null, {})
    assert Path("/dev/null").is_char_device()


def test_whether_a_document_can_be_written_is_known_before_and_leaves_no_file(tmp_path: Path) -> None:
    result.check_writable(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.json").write_text("kept")
    result.check_writable(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == "kept"
    for path in (tmp_path, tmp_path / "none" / "a.json"):
        with pytest.raises(OSError, match="directory"):
            result.check_writable(path)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=300))
def test_percentiles_are_those_of_the_standard_library(samples: list[Any]) -> None:
    ordered, cuts = sorted(samples), statistics.quantiles(samples, n=100, method="inclusive")
    for percent in range(1, 100):
        assert result.percentile(ordered, percent) == pytest.approx(cuts[percent - 1], rel=1e-9, abs=1e-9)
    assert (result.percentile(ordered, 0), result.percentile(ordered, 100)) == (ordered[0], ordered[-1])
