"""Plant one bug at a time in a copy of the code, and say which suites notice: `python -m tests.mutants [WORD ...]`.

The first suite is the bugged file's own tests, as the mirror of the rooms has them; then come those of its part. With
`--first` a bug ends at the first test that notices it, and the test that noticed it last time (`noticed.json`) is tried
before all others, so that a bug takes one test where it took suites.

A checker that never fails proves nothing. A mutant that survives everything is either harmless, and says here why, or
shows that an oracle is weak. Run by hand or weekly, not on every commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from attrs import frozen

from tests.mutants.bug import Bug
from tests.mutants.table import MUTANTS, PARTS, SUITES
from tests.repository.test_mirror import own_tests

ROOT = Path(__file__).parents[2]
TEST_MAX_S = 40  # beside other suites tests have taken more than 25
OWN = "own"  # the suite of a file's own tests
NOTICED = Path(__file__).with_name("noticed.json")  # by the name of a bug: the test that noticed it last
FOLDERS = ("protocol", "actors", "supervisor", "bench", "tests", "examples")


@contextmanager
def copied() -> Iterator[Path]:
    """Copy what the suites need into a folder of its own."""
    with tempfile.TemporaryDirectory() as place:
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("*.safetensors")  # compiled files save most of a short suite's time
            shutil.copytree(ROOT / name, Path(place, name), ignore=ignored)
        for name in ("pyproject.toml", "Makefile"):
            shutil.copy(ROOT / name, place)
        yield Path(place)


def plant(bug: Bug, file: Path) -> None:
    """Write a bug into a file; exit if its place in the code is not found once."""
    text = file.read_text()
    if text.count(bug.old) != 1:
        sys.exit(f"{bug.name}: what it replaces occurs {text.count(bug.old)} times in {file}")
    file.write_text(text.replace(bug.old, bug.new))


@frozen
class Failure:
    """The first test of a suite that failed or did not end, and what to print of it."""

    test: str
    about: str
    slow: bool = False  # it did not end in time


@frozen
class Verdict:
    """What to print of a bug, and the first test that noticed it, if one did."""

    about: str
    test: str = ""


def first_failure(folder: Path, arguments: Sequence[str], patience_s: float) -> Failure | None:
    """Run a suite up to its first failure, and return that, if there is one; a suite that hangs has failed."""
    hang = ["-o", f"faulthandler_timeout={TEST_MAX_S}", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", *hang, *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=patience_s, check=False, text=True)
    except subprocess.TimeoutExpired:
        return Failure("", f"not done in {patience_s:.0f} s", slow=True)
    if done.returncode in {0, 5}:  # 5: no test is chosen
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode in {1, 2} and failed:  # 2: a bug may break a file of tests while it is imported
        return Failure(failed[1], failed[1].rpartition("/")[2])
    if "Timeout (" in done.stderr:
        begun = re.findall(r"^(tests/\S+::.*?) *(?:PASSED.*)?$", done.stdout, re.MULTILINE)
        test = begun[-1] if begun else ""
        return Failure(test, f"{test.rpartition('/')[2]} does not end in {TEST_MAX_S} s", slow=True)
    sys.exit(done.stdout + done.stderr)


@cache
def sound(arguments: tuple[str, ...], patience_s: float) -> bool:
    """Return whether a suite passes where no bug is planted; one that does not would notice them all.

    Exits if it fails; it is not sound, either, if it is too slow beside other work, in two runs.
    """
    for _ in range(2):
        with copied() as folder:
            if (failed := first_failure(folder, arguments, patience_s)) is None:
                return True
        if not failed.slow:
            sys.exit(f"a suite fails without any bug: {failed.about}")
        print(f"a suite is too slow without any bug: {failed.about}", flush=True)  # noqa: T201
    return False


def arguments_of(suite: str, path: str) -> tuple[str, ...]:
    """Return what a suite asks of pytest for a bug in a file."""
    return tuple(SUITES[suite]) if suite != OWN else (*own_tests(Path(path)), "-m", "not realtime and not engine")


def verdict(path: str, bug: Bug, suites: list[str], *, first: bool, patience_s: float, known: str = "") -> Verdict:
    """Return the suites that notice a bug in a file, or why none need notice, or that none does.

    With `first` the first failure is enough; the test `known` is tried before the suites.
    """
    noticed, test = [], ""
    with copied() as folder:
        plant(bug, folder / path)
        failed = first_failure(folder, (known,), patience_s) if known else None
        if failed is not None and (not failed.slow or sound((known,), patience_s)):
            return Verdict(known, known)
        for suite in suites:
            arguments = arguments_of(suite, path)
            failed = first_failure(folder, arguments, patience_s)
            if failed is not None and sound(arguments, patience_s):
                noticed.append(f"{suite}: {failed.about}")
                test = test or failed.test
                if first:
                    break
    return Verdict(", ".join(noticed) or (f"harmless: {bug.harmless}" if bug.harmless else "SURVIVED"), test)


def known_tests() -> dict[str, str]:
    """Return the test that noticed each bug last, by the name of the bug, without bugs and tests that are no more."""
    tests: dict[str, str] = json.loads(NOTICED.read_text()) if NOTICED.exists() else {}
    names = {bug.name for _, bug, _ in MUTANTS}
    there = collected(sorted({test.partition("::")[0] for test in tests.values()}))
    return {name: test for name, test in tests.items() if name in names and test in there}


def collected(files: Sequence[str]) -> set[str]:
    """Return the tests in those of `files` that exist."""
    there = [file for file in files if Path(ROOT, file).exists()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *there]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True) if there else None
    return set() if done is None else set(re.findall(r"^tests/\S+::.*$", done.stdout, re.MULTILINE))


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[""])
    parser.add_argument("--suite", action="append", choices=[OWN, *SUITES], help="only this one")
    parser.add_argument("--first", action="store_true", help="stop at the first suite that notices")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--patience-s", type=float, default=100.0, help="a suite that takes longer has noticed, too")
    return parser.parse_args()


def main() -> int:
    """Try each mutant whose name, or part, has one of the words in it; fail if a harmful one survives."""
    asked = options()
    chosen = [mutant for mutant in MUTANTS if any(word in f"{mutant[2]}: {mutant[1].name}" for word in asked.words)]
    known = known_tests()
    shortcuts = known if asked.first and not asked.suite else {}
    survived = 0

    def judged(mutant: tuple[str, Bug, str]) -> Verdict:
        path, bug, part = mutant
        home = PARTS[part]
        others = () if asked.first and bug.harmless else (name for name in SUITES if name not in home)
        own = [OWN] if own_tests(Path(path)) else []  # a plugin's file has none that mirror it
        suites = asked.suite or [*own, *home, *others]
        test = shortcuts.get(bug.name, "")
        return verdict(path, bug, suites, first=asked.first, patience_s=asked.patience_s, known=test)

    if tests := {shortcuts[bug.name] for _, bug, _ in chosen if bug.name in shortcuts}:
        sound(tuple(sorted(tests)), asked.patience_s)  # all of them at once; exits if one fails without any bug
    with ThreadPoolExecutor(asked.processes) as pool:
        running = {pool.submit(judged, mutant): mutant[1].name for mutant in chosen}
        for done in as_completed(running):
            name, judgement = running[done], done.result()
            survived += judgement.about == "SURVIVED"
            print(f"{name:62s} {judgement.about}", flush=True)  # noqa: T201
            if judgement.test and known.get(name) != judgement.test:
                known[name] = judgement.test
                NOTICED.write_text(json.dumps(known, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    print(f"{len(chosen)} planted, {survived} survived")  # noqa: T201
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
