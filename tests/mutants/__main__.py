"""Plant one bug at a time in a copy of the code, and print the test that notices it: `python -m tests.mutants [WORD ...]`.

A test that never fails proves nothing. For each bug the tests run that its row names, then the own tests of its file, as the
mirror of the rooms has them, then all tests in that folder, up to the first failure. A bug that survives shows that a test
is weak, and fails the run. A row whose text is gone is stale: it is printed, and the run goes on.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tests.mutants.bug import Bug, bugs
from tests.repository.mirror import own_tests

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocol", "actors", "supervisor", "bench", "tests", "examples")
TEST_S_MAX = 40  # a test that takes longer hangs
SUITE_S_MAX = 300
ENDS_WELL = {0, 5}  # 5: no test is chosen


@contextmanager
def copied(source: Path = ROOT) -> Iterator[Path]:
    """Copy what the tests need into a folder of its own, so that several bugs can be tried at a time."""
    with tempfile.TemporaryDirectory() as place:
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("*.safetensors")  # compiled files save most of a short suite's time
            shutil.copytree(source / name, Path(place, name), ignore=ignored)
        for name in ("pyproject.toml", "Makefile"):
            shutil.copy(source / name, place)
        yield Path(place)


def first_failure(folder: Path, tests: Sequence[str]) -> str:
    """Run tests up to the first that fails or hangs, and return it, or nothing if all pass."""
    hang = ["-o", f"faulthandler_timeout={TEST_S_MAX}", "-o", "faulthandler_exit_on_timeout=true"]
    chosen = ["-m", "not realtime and not engine", *tests]
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", *hang, *chosen]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=SUITE_S_MAX, check=False, text=True)
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode in ENDS_WELL:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed is not None:
        return failed[1]
    begun = re.findall(r"^(tests/\S+::.*?) *(?:PASSED.*)?$", done.stdout, re.MULTILINE)
    if "Timeout (" not in done.stderr or not begun:
        sys.exit(done.stdout + done.stderr)
    return str(begun[-1])


def suites(bug: Bug) -> Iterator[Sequence[str]]:
    """Return the tests to run with a bug, the likeliest to notice it first."""
    folder = sorted((ROOT / "tests" / bug.path).parent.glob("test_*.py"))
    for suite in (bug.tests, own_tests(Path(bug.path)), [str(file.relative_to(ROOT)) for file in folder]):
        if suite:
            yield suite


def verdict(bug: Bug, sound: Path) -> str:
    """Return `noticed`, `SURVIVED`, `UNSOUND` (the test fails without the bug as well) or `stale`, and the test."""
    with copied(sound) as folder:
        file = folder / bug.path
        planted = bug.planted_in(file.read_text()) if file.exists() else None
        if planted is None:
            return "stale"
        file.write_text(planted)
        for suite in suites(bug):
            if test := first_failure(folder, suite):
                alone = test.partition("[")[0]  # the name of a case may have any character
                return f"{'UNSOUND' if first_failure(sound, [alone]) else 'noticed'} by {test}"
    return "SURVIVED"


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "words", nargs="*", default=[""], help="plant the bugs with one of these in class, file or name"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no bug after this time")
    parser.add_argument(
        "--seed", type=int, default=datetime.now(UTC).toordinal(), help="of the order; default: the day"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="bugs at a time")
    return parser.parse_args()


def main() -> int:
    """Plant the bugs in a drawn order; fail if one survives."""
    asked, begun = options(), time.monotonic()
    chosen = [bug for bug in bugs() if any(word in f"{bug.kind}: {bug.path}: {bug.name}" for word in asked.words)]
    random.Random(asked.seed).shuffle(chosen)
    found = dict[str, list[str]]()

    def judged(bug: Bug, sound: Path) -> tuple[str, float]:
        at = time.monotonic()
        late = at - begun > 60 * asked.minutes
        return "left out" if late else verdict(bug, sound), time.monotonic() - at

    with copied() as sound, ThreadPoolExecutor(asked.processes) as pool:
        running = {pool.submit(judged, bug, sound): f"{bug.kind}: {bug.name}" for bug in chosen}
        for done in as_completed(running):
            result, took_s = done.result()
            found.setdefault(result.partition(" by ")[0], []).append(running[done])
            if result != "left out":
                print(f"{took_s:4.0f} s  {running[done]}: {result}", flush=True)  # noqa: T201
    for result in ("stale", "UNSOUND", "SURVIVED"):
        for name in found.get(result, ()):
            print(f"{result}: {name}")  # noqa: T201
    print(f"seed {asked.seed}:", ", ".join(f"{len(names)} {result}" for result, names in found.items()))  # noqa: T201
    return int("SURVIVED" in found or "UNSOUND" in found)


if __name__ == "__main__":
    sys.exit(main())
