"""The lists of packages, their lock files and the package's own requirements agree."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
LOCKING = runpy.run_path(str(FOLDER / "lock.py"))
LOCKED = re.compile(r"(\S+==\S+) --hash=sha256:[0-9a-f]{64}")


@pytest.mark.parametrize("name", ["cpu", "dev"])
def test_a_lock_file_holds_a_hash_for_each_pin_of_its_list_and_no_other(name: str) -> None:
    pins = LOCKING["pins"]((FOLDER / f"{name}.txt").read_text())
    lines = (FOLDER / f"{name}.lock").read_text().splitlines()[1:]
    locked = [found[1] for line in lines if (found := LOCKED.fullmatch(line))]
    assert (locked, len(lines)) == (list(pins.values()), len(pins)), "run: make lock"


def test_the_installer_takes_the_lock_files_where_they_were_made() -> None:
    assert LOCKING["PLATFORM"] in (FOLDER / "packages.sh").read_text()


def test_what_a_node_needs_is_in_the_lean_set() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = LOCKING["pins"]((FOLDER / "cpu.txt").read_text())
    assert {LOCKING["canonical"](each.partition(">=")[0]) for each in project["dependencies"]} <= pins.keys()
