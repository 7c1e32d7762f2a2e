"""The lists of packages, their lock files and the package's own requirements agree."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from tests.repository.sources import FILES, foreign

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
LOCKING = runpy.run_path(str(FOLDER / "lock.py"))
PACKAGES = {"PIL": "pillow", "zmq": "pyzmq"}  # of modules with other names
LOCKED = re.compile(r"(\S+==\S+) --hash=sha256:[0-9a-f]{64}")


@pytest.mark.parametrize("name", ["cpu", "dev"])
def test_a_lock_file_holds_a_hash_for_each_pin_of_its_list_and_no_other(name: str) -> None:
    pins = LOCKING["pins"]((FOLDER / f"{name}.txt").read_text())
    lines = (FOLDER / f"{name}.lock").read_text().splitlines()[1:]
    locked = [found[1] for line in lines if (found := LOCKED.fullmatch(line))]
    assert (locked, len(lines)) == (list(pins.values()), len(pins)), "run: make lock"


def test_the_installer_takes_the_lock_files_where_they_were_made() -> None:
    assert LOCKING["PLATFORM"] in (FOLDER / "packages.sh").read_text()


def stated() -> dict[str, set[str]]:
    """Return the packages that `pyproject.toml` asks for, and for each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {LOCKING["canonical"](re.split("[>=]", each)[0]) for each in lists[extra]} for extra in lists}


def test_what_a_node_needs_is_in_the_lean_set() -> None:
    pins = LOCKING["pins"]((FOLDER / "cpu.txt").read_text())
    for packages in stated().values():
        assert packages <= pins.keys()


def is_of_host(path: Path) -> bool:
    return path.parts[:2] == ("actors", "engines") and "host" in path.parts[2:4]


def test_what_a_node_imports_is_stated() -> None:
    """What only the process of an engine imports comes with the engine."""
    files = [path for path in FILES if path.parts[0] != "bench" and not is_of_host(path)]
    modules = set[str]().union(*map(foreign, files)) - {"protocol", "actors", "supervisor"}
    assert {LOCKING["canonical"](PACKAGES.get(name, name)) for name in modules} <= set().union(*stated().values())


def test_no_older_minor_release_is_allowed_than_the_tested_one() -> None:
    pins = LOCKING["pins"]((FOLDER / "cpu.txt").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in (
        *project["dependencies"],
        *extras["media"],
        *extras["fastokens"],
        *extras["nixl"],
        *extras["tracing"],
    ):
        name, _, floor = requirement.partition(">=")
        tested = [int(part) for part in pins[LOCKING["canonical"](name)].partition("==")[2].split(".")]
        stated_floor = [int(part) for part in floor.split(".")]
        assert stated_floor[:2] == tested[:2], requirement
        assert stated_floor <= tested, requirement


def test_the_pythons_that_the_package_allows_are_those_that_it_states() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minors = [int(each.rpartition(".")[2]) for each in project["classifiers"] if ":: 3." in each]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert project["requires-python"] == f">=3.{minors[0]},<3.{minors[-1] + 1}"
    text = (FOLDER / "install.sh").read_text()
    assert f"not (3, {minors[0]}) <= sys.version_info < (3, {minors[-1] + 1})" in text
    assert f"Python 3.{minors[0]} to 3.{minors[-1]}" in text
