"""What a run of the tests makes of failures, of tests that fail beside others alone, and of an interrupt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.run.nightly import NIGHTLY, write_page
from tests.run.outcomes import Outcome, Result, summary
from tests.run.parts import PYTEST, ROOT, Part, Stage, run_to_the_end


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder inside the repository, so that pytest names its tests by paths that it can find again."""
    (ROOT / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=ROOT / "build") as path:
        yield Path(path)


def pytest_of(file: Path, text: str) -> tuple[str, ...]:
    """Return a command that runs a file of tests by the plugins of this repository."""
    file.write_text(textwrap.dedent(text))
    return (*PYTEST, "-p", "tests.conftest", str(file))


def result_of(folder: Path, text: str) -> Result:
    """Return the result of a part whose tests depend on real time."""
    part = Part("part", pytest_of(folder / "test_file.py", text), is_realtime=True)
    return only_result(part, folder / "run")


def only_result(part: Part, folder: Path) -> Result:
    results = run_to_the_end([Stage((part,))], folder)
    assert results is not None
    return results[0]


def test_a_test_that_fails_once_and_passes_alone_is_flaky_and_the_part_is_good(folder: Path) -> None:
    result = result_of(
        folder,
        f"""
        from pathlib import Path

        def test_late():
            before = Path({str(folder / "before")!r})
            seen = before.exists()
            before.touch()
            assert seen

        def test_well():
            pass
        """,
    )
    assert [Path(test).name for test in result.flaky] == ["test_file.py::test_late"]
    assert result.is_good
    lines = list(summary([result], 1.0))
    assert lines[-1] == "2 passed, 0 failed, 0 skipped"
    assert any(line.startswith("flaky: ") and "test_late" in line for line in lines)


def test_a_test_that_fails_twice_fails_its_part(folder: Path) -> None:
    result = result_of(folder, "def test_wrong():\n    assert False\n")
    assert (result.flaky, len(result.failed), result.is_good) == ([], 1, False)
    assert list(summary([result], 1.0))[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_run_of_pytest_that_a_test_starts_is_no_part_of_its_own(folder: Path) -> None:
    (folder / "inner").mkdir()
    inner = pytest_of(folder / "inner" / "test_inner.py", "def test_wrong():\n    assert False\n")
    text = f"import subprocess\n\ndef test_it():\n    assert subprocess.run({inner!r}).returncode == 1\n"
    result = result_of(folder, text)
    assert [Path(outcome.test).name for outcome in result.outcomes] == ["test_file.py::test_it"]
    assert result.is_good


def test_a_part_whose_tests_cannot_be_collected_fails(folder: Path) -> None:
    result = result_of(folder, "import nothing_of_this_name\n")
    assert not result.is_good
    assert list(summary([result], 1.0))[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_command_without_tests_fails_by_its_exit_status(folder: Path) -> None:
    result = only_result(Part("lint", ("false",)), folder)
    assert not result.is_good
    assert list(summary([result], 1.0))[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_part_in_the_background_leaves_the_processor_to_others(folder: Path) -> None:
    command = (sys.executable, "-c", "import os; print(os.nice(0))")
    assert only_result(Part("nice", command, in_background=True), folder).log.read_text() == "19\n"
    assert only_result(Part("usual", command), folder).log.read_text() == f"{os.nice(0)}\n"


def test_a_run_that_takes_too_long_names_the_files_that_take_most_of_it() -> None:
    outcomes = [Outcome("tests/a.py::test_x", "passed", 300.0), Outcome("tests/b.py::test_y", "passed", 700.0)]
    lines = list(summary([Result("units", 0, 1000.0, Path("log"), outcomes)], 1000.0))
    assert [line.split()[-1] for line in lines if line.endswith(".py")] == ["tests/b.py", "tests/a.py"]


def test_a_nightly_run_names_words_of_the_makefile_and_writes_a_row_for_each_part(folder: Path) -> None:
    words = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {part.name for stage in NIGHTLY for part in stage.parts if not part.command} <= {*words}
    log = folder / "soak.log"
    log.write_text("2,000 requests\nnothing | grows\n\n")
    outcomes = [Outcome("tests/a.py::test_x", "failed", 1.0)]
    page = write_page([Result("soak", 0, 61.0, log), Result("late", 1, 9.4, log, outcomes)], folder).read_text()
    assert "| soak | ok | 61 | nothing \\| grows |" in page
    assert "| late | **failed** | 9 |" in page
    assert "- failed: `tests/a.py::test_x`" in page


@pytest.mark.realtime
def test_ctrl_c_ends_a_run_in_the_middle_of_a_test_and_starts_no_other(folder: Path) -> None:
    begun, second = folder / "begun", folder / "second"
    command = pytest_of(
        folder / "test_file.py",
        f"""
        from pathlib import Path
        import trio

        async def test_first():
            async with trio.open_nursery():
                Path({str(begun)!r}).touch()
                await trio.sleep(60)

        def test_second():
            Path({str(second)!r}).touch()
        """,
    )
    code = f"""
        from pathlib import Path
        from tests.run.parts import Part, Stage, run_to_the_end
        assert run_to_the_end([Stage((Part("part", {command!r}),))], Path({str(folder / "run")!r})) is None
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT) as run:
        while not begun.exists():
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 0
    assert not second.exists()
