"""Plant one bug at a time in a copy of the code, and say which suites notice: `python -m tests.mutants [WORD ...]`.

The first suite is the bugged file's own tests, as the mirror of the rooms has them; then come those of its part.

A checker that never fails proves nothing. A mutant that survives everything is either harmless, and says here why, or
shows that an oracle is weak. Run by hand or weekly, not on every commit.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.mutants.bug import Bug
from tests.mutants.table import MUTANTS, PARTS, SUITES
from tests.repository.test_mirror import own_tests

ROOT = Path(__file__).parents[2]
TEST_MAX_S = 40  # three or four times what the longest takes where other suites run beside it
OWN = "own"  # the suite of a file's own tests
FOLDERS = ("protocol", "actors", "supervisor", "bench", "tests", "examples")


@contextmanager
def copied() -> Iterator[Path]:
    """Copy what the suites need into a folder of its own."""
    with tempfile.TemporaryDirectory() as place:
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("cpu", "*.safetensors")  # compiled files save most of a short suite's time
            shutil.copytree(ROOT / name, Path(place, name), ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", place)
        yield Path(place)


def plant(bug: Bug, file: Path) -> None:
    """Write a bug into a file; exit if its place in the code is not found once."""
    text = file.read_text()
    if text.count(bug.old) != 1:
        sys.exit(f"{bug.name}: what it replaces occurs {text.count(bug.old)} times in {file}")
    file.write_text(text.replace(bug.old, bug.new))


def first_failure(folder: Path, arguments: Sequence[str], patience_s: float) -> str:
    """Run a suite up to its first failure, and return the test that failed, if any; a suite that hangs has failed."""
    hang = ["-o", f"faulthandler_timeout={TEST_MAX_S}", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *hang, *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=patience_s, check=False, text=True)
    except subprocess.TimeoutExpired:
        return f"not done in {patience_s:.0f} s"
    if done.returncode in {0, 5}:  # 5: no test is chosen
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) tests/(?:\S*/)?(.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode in {1, 2} and failed:  # 2: a bug may break a file of tests while it is imported
        return failed[1]
    if "Timeout (" in done.stderr:
        return f"a test does not end in {TEST_MAX_S} s"
    sys.exit(done.stdout + done.stderr)


@cache
def sound(arguments: tuple[str, ...], patience_s: float) -> bool:
    """Return true if a suite passes where no bug is planted; one that does not would notice them all."""
    for _ in range(2):  # other work beside it may make one run too slow
        with copied() as folder:
            if not (failed := first_failure(folder, arguments, patience_s)):
                return True
    sys.exit(f"a suite fails without any bug: {failed}")


def arguments_of(suite: str, path: str) -> tuple[str, ...]:
    """Return what a suite asks of pytest for a bug in a file."""
    return tuple(SUITES[suite]) if suite != OWN else (*own_tests(Path(path)), "-m", "not realtime and not engine")


def verdict(path: str, bug: Bug, suites: list[str], *, first: bool, patience_s: float) -> str:
    """Return the suites that notice a bug in a file, or why none need notice, or that none does."""
    noticed = []
    with copied() as folder:
        plant(bug, folder / path)
        for suite in suites:
            arguments = arguments_of(suite, path)
            if (failed := first_failure(folder, arguments, patience_s)) and sound(arguments, patience_s):
                noticed.append(f"{suite}: {failed}")
                if first:
                    break
    return ", ".join(noticed) or (f"harmless: {bug.harmless}" if bug.harmless else "SURVIVED")


def main() -> int:
    """Try each mutant whose name, or part, has one of the words in it; fail if a harmful one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[""])
    parser.add_argument("--suite", action="append", choices=[OWN, *SUITES], help="only this one")
    parser.add_argument("--first", action="store_true", help="stop at the first suite that notices")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--patience-s", type=float, default=100.0, help="a suite that takes longer has noticed, too")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if any(word in f"{mutant[2]}: {mutant[1].name}" for word in options.words)]
    survived = 0

    def judged(mutant: tuple[str, Bug, str]) -> str:
        path, bug, part = mutant
        home = PARTS[part]
        others = () if options.first and bug.harmless else (name for name in SUITES if name not in home)
        suites = options.suite or [OWN, *home, *others]
        return verdict(path, bug, suites, first=options.first, patience_s=options.patience_s)

    with ThreadPoolExecutor(options.processes) as pool:
        for (_, bug, _), judgement in zip(chosen, pool.map(judged, chosen), strict=True):
            survived += judgement == "SURVIVED"
            print(f"{bug.name:62s} {judgement}", flush=True)  # noqa: T201
    print(f"{len(chosen)} planted, {survived} survived")  # noqa: T201
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
