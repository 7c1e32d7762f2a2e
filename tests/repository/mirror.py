"""The tests of each file of the product and of the benches, as its path and the imports give them.

`tests/<folder>/test_<file>.py` has the tests of `<folder>/<file>.py`, and `test_<file>_<topic>.py` beside it has more of them.
A file without such tests is tested where it is imported: by tests, those in the mirrored folder first, or by the files of its
own folder, those below it and the folder above it, whose tests are then its own. What no import shows has a row in `TESTED_BY`; a bench that is only ever run by hand
has one in `RUN_BY_HAND`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.repository.sources import FILES, ROOMS, ROOT, imports, module, text

PATCHES = {"cpu", "plugin"}  # of SGLang itself: what they do is tested on the real engine

TESTED_BY = {  # below `tests/`: the files that have their tests there
    "actors/engines/simulated/test_output.py": ("actors/engines/simulated/sentences.py",),
    "actors/test_canary.py": ("actors/engines/slots/probe.py",),
    "actors/test_publisher.py": ("actors/engines/blocks/following.py",),
    "bench/report/test_summary.py": ("bench/report/command.py",),
    "bench/peers/test_install.py": ("bench/peers/command.py",),
    "supervisor/media/test_decoding.py": ("actors/media/decoder/__main__.py",),
    "bench/faults/test_scenario.py": ("bench/faults/__main__.py",),
    "system/sglang": (
        "actors/engines/host/watchers.py",
        "actors/engines/sglang/host/__main__.py",
    ),
    "system/trtllm": (
        "actors/engines/trtllm/engine.py",
        "actors/engines/trtllm/host/__main__.py",
        "actors/engines/trtllm/host/encoder.py",
    ),
}
RUN_BY_HAND = {  # they check their own results
    "bench/faults/honest_client.py",
    "bench/routing/kv_routers.py",
    "bench/routing/policies.py",
}

ALL = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
TESTS = [path for path in ALL if path.parts[1] in ROOMS and not PATCHES & {*path.parts}]
PRODUCT = {path for path in FILES if path.name != "__init__.py" and not PATCHES & {*path.parts}}
FOLDERS = {folder: [path for path in PRODUCT if path.parent == folder] for folder in {path.parent for path in PRODUCT}}
IMPORT = re.compile(r"^from (\S+) import (?:\(([^)]*)\)|(.*))|^import (\S+)", re.MULTILINE)


@cache
def product_file_of(test: Path) -> Path | None:
    """Return the product file whose name a test file begins with, the longest if there are several."""
    folder, name = Path(*test.parts[1:-1]), test.stem.removeprefix("test_")
    named = [path for path in FOLDERS.get(folder, ()) if f"{name}_".startswith(f"{path.stem}_")]
    return max(named, key=lambda path: len(path.stem), default=None)


@cache
def named_tests() -> dict[Path, list[Path]]:
    """Return the test files of each product file whose name they begin with."""
    named = defaultdict[Path, list[Path]](list)
    for test in TESTS:
        if (file := product_file_of(test)) is not None:
            named[file].append(test)
    return named


@cache
def imports_of_test(test: Path) -> set[str]:
    """Return every module that a test file, or a program in it, imports; a parser would take ten times as long."""
    found = IMPORT.findall(text(test))
    names = {f"{package}.{name.strip()}" for package, *lists, _ in found for name in "".join(lists).split(",")}
    return names | {package or name for package, _, _, name in found}


@cache
def files_near(folder: Path) -> list[Path]:
    """Return the files in a folder, at any depth, and those beside it."""
    return [path for path in FILES if folder in path.parents or path.parent == folder.parent]


def found_tests(file: Path, above: frozenset[Path] = frozenset()) -> list[Path]:
    """Return the test files of a product file that need no row; `above` are the files that it was reached from."""
    if named := named_tests().get(file):
        return named
    name = module(file)
    if direct := [test for test in ALL if name in imports_of_test(test)]:
        folder = Path("tests") / file.parent
        return [test for test in direct if test.parent == folder] or direct
    beside = [path for path in files_near(file.parent) if path not in {file, *above}]
    users = [path for path in beside if name in imports(path)]
    return list(dict.fromkeys(test for path in users for test in found_tests(path, above | {file})))


def own_tests(file: Path) -> list[str]:
    """Return the files that have a product file's own tests, and folders of tests."""
    rows = [f"tests/{name}" for name, paths in TESTED_BY.items() if str(file) in paths]
    return rows or [str(test) for test in found_tests(file)]
