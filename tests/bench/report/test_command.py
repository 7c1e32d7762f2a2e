"""The command reads documents of any bench, and names a file that is none."""

import argparse
from pathlib import Path

import pytest

from bench.report import command
from bench.rig import result
from bench.rig.result import Result


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add(parser)
    return command.main(parser, parser.parse_args(words), words)


def test_a_page_is_written_of_all_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        result.write(
            tmp_path / f"{name}.json",
            Result(schema="s", title=f"The {name}", command=[], begun_at="", versions={}, machine={}),
        )
    files = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    assert run(*files, "--output", str(tmp_path / "r.html"), "--title", "Both") == 0
    text = (tmp_path / "r.html").read_text()
    assert all(each in text for each in ("The one", "The two", "<title>Both</title>"))
    assert capsys.readouterr().out.strip().endswith("r.html")


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_a_file_that_is_no_document_is_named(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        run(str(tmp_path / "a.json"))
    assert ended.value.code == 2
    assert "a.json" in capsys.readouterr().err
