"""Run the fast tests on each supported Python that this machine has beside its own: `python -m tests.run.pythons`.

The supported Pythons are the classifiers in `pyproject.toml`. An environment of each is made below `build/pythons`, by the
pinned lists without the packages that only an engine's process imports, so the tests that import them are skipped there. A
Python that is not here, or for which the packages cannot be installed, is skipped and named in the last line.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.run.parts import ROOT

FAST = ("-m", "not realtime and not engine and not nightly")
LISTS = ("cpu.txt", "dev.txt")
ENGINE_ONLY = {"decord", "mooncake-transfer-engine-non-cuda", "sglang", "torch", "torchvision", "triton", "xgrammar"}
CLASSIFIER = "Programming Language :: Python :: "
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def supported() -> list[str]:
    """Return the versions of Python that the package states, such as `3.12`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each.removeprefix(CLASSIFIER) for each in project["classifiers"] if each.startswith(f"{CLASSIFIER}3.")]


def interpreter(version: str) -> str | None:
    """Return a command of that version of Python, on the path or of pyenv; None if there is none."""
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for command in (shutil.which(f"python{version}"), *map(str, reversed(of_pyenv))):
        # pyenv's own commands on the path fail for a version that is not selected.
        if command is not None and _output(command, "-c", VERSION) == version:
            return command
    return None


def packages(text: str) -> Iterator[str]:
    """Yield the pins of a list without those of `ENGINE_ONLY`."""
    for line in text.splitlines():
        pin = line.partition("#")[0].strip()
        if pin and pin.partition("==")[0] not in ENGINE_ONLY:
            yield pin


def environment(version: str) -> Path | str:
    """Return the interpreter of an environment for the tests, or the reason why there is none."""
    folder = ROOT / "build" / "pythons" / version
    python, done = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join(pin for name in LISTS for pin in packages((ROOT / "requirements" / name).read_text()))
    if done.exists() and done.read_text() == wanted:
        return python
    if (command := interpreter(version)) is None:
        return "there is no such interpreter here"
    shutil.rmtree(folder, ignore_errors=True)
    install = (str(python), "-m", "pip", "install", *_PIP, *wanted.split("\n"))
    for arguments in ((command, "-m", "venv", str(folder)), install):
        made = subprocess.run(arguments, check=False, capture_output=True, text=True, errors="replace")
        if made.returncode:
            lines = made.stderr.strip().splitlines() or [f"exit status {made.returncode}"]
            return f"its packages cannot be installed: {lines[-1]}"
    done.write_text(wanted)
    return python


_PIP = ("--quiet", "--no-deps", "--disable-pip-version-check")


def _output(*arguments: str) -> str:
    run = subprocess.run(arguments, check=False, capture_output=True, text=True, errors="replace")
    return run.stdout.strip() if run.returncode == 0 else ""


def main() -> int:
    """Run the tests on each version and sum up; the exit status is 0 if none failed."""
    own = ".".join(map(str, sys.version_info[:2]))
    ended = dict[str, str]()
    for version in supported():
        if version == own:
            continue
        python = environment(version)
        if isinstance(python, str):
            ended[version] = f"skipped, {python}"
        else:
            code = subprocess.run((python, "-m", "pytest", *FAST), cwd=ROOT, check=False).returncode
            ended[version] = "FAILED" if code else "passed"
        print(f"Python {version}: {ended[version]}", flush=True)
    print("; ".join(f"{version}: {end}" for version, end in ended.items()))
    return int("FAILED" in ended.values())


if __name__ == "__main__":
    sys.exit(main())
