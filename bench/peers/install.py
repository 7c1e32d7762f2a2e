"""The environments of peers: each made from its list, beside this file, in a folder of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from bench.peers.peer import MARK

LISTS = Path(__file__).parent


def environment_names() -> list[str]:
    """Return the names of all environments."""
    return sorted(path.stem for path in LISTS.glob("*.txt"))


def is_installed(name: str, environments: Path, lists: Path | None = None) -> bool:
    """Whether an environment was installed to the end from its list as it is now: a peer's title names its version."""
    try:
        return (environments / name / MARK).read_text() == digest((lists or LISTS) / f"{name}.txt")
    except FileNotFoundError:
        return False


def digest(packages: Path) -> str:
    """Return a hash of a list and its included lists."""
    text = packages.read_text()
    included = (line.split()[1] for line in text.splitlines() if line.startswith("-r "))
    parts = (text, *(digest(packages.parent / path) for path in included))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(name: str, environments: Path, lists: Path | None = None) -> None:
    """Make an environment, or bring it up to its list; raises `CalledProcessError` if a package cannot be had.

    What is missing in it counts as not installed: its mark is written last.
    """
    if is_installed(name, environments, lists):
        return
    folder, packages = environments / name, (lists or LISTS) / f"{name}.txt"
    mark = folder / MARK
    mark.unlink(missing_ok=True)
    if not (folder / "bin" / "python").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # A check of the packages' own requirements would fail: the lists leave out what is not needed on a CPU.
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "--no-deps", "-r", str(packages)], check=True)
    mark.write_text(digest(packages))
