"""Plant one bug at a time in a copy of the code, and say which suites notice: `python -m tests.mutants [WORD ...]`.

A checker that never fails proves nothing. A mutant that survives everything is either harmless, and says here why, or
shows that an oracle is weak. Run by hand or weekly, not on every commit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tests.mutants.bug import Bug
from tests.mutants.table import MUTANTS, PARTS, SUITES

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100  # a suite that hangs has noticed, too


def planted(path: str, bug: Bug, folder: Path) -> Path:
    """Copy what is needed, with the bug in it."""
    for name in ("protocol", "actors", "supervisor", "bench", "tests", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "cpu", "*.safetensors")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    text = (folder / path).read_text()
    if text.count(bug.old) != 1:
        sys.exit(f"{bug.name}: what it replaces occurs {text.count(bug.old)} times in {path}")
    (folder / path).write_text(text.replace(bug.old, bug.new))
    return folder


def noticed(folder: Path, arguments: list[str]) -> bool:
    """Run a suite up to its first failure; a suite that hangs has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in {0, 1}:  # that is no test's failure
        sys.exit(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 1


@cache
def sound(name: str) -> bool:
    """Whether a suite passes where no bug is planted; one that does not would notice them all."""
    if noticed(ROOT, SUITES[name]):
        sys.exit(f"the suite {name} fails without any bug")
    return True


def verdict(path: str, bug: Bug, suites: list[str], *, first: bool) -> str:
    """Return the suites that notice a bug in a file, or why none need notice, or that none does."""
    by = []
    with tempfile.TemporaryDirectory() as place:
        folder = planted(path, bug, Path(place))
        for name in suites:
            if noticed(folder, SUITES[name]) and sound(name):
                by.append(name)
                if first:
                    break
    return ", ".join(by) or (f"harmless: {bug.harmless}" if bug.harmless else "SURVIVED")


def main() -> int:
    """Try each mutant whose name, or part, has one of the words in it; fail if a harmful one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[""])
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this one")
    parser.add_argument("--first", action="store_true", help="stop at the first suite that notices")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if any(word in f"{each[2]}: {each[1].name}" for word in options.words)]
    survived = 0

    def judged(mutant: tuple[str, Bug, str]) -> str:
        path, bug, part = mutant
        home = PARTS[part]
        suites = options.suite or [*home, *(name for name in SUITES if name not in home)]
        return verdict(path, bug, suites, first=options.first)

    with ThreadPoolExecutor(options.processes) as pool:
        for (_, bug, _), said in zip(chosen, pool.map(judged, chosen), strict=True):
            survived += said == "SURVIVED"
            print(f"{bug.name:62s} {said}", flush=True)  # noqa: T201
    print(f"{len(chosen)} planted, {survived} survived")  # noqa: T201
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
