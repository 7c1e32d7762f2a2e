"""Write the lock files: each pinned release with the SHA-256 of the file that pip installs of it.

usage: python requirements/lock.py [pip options]

People edit `cpu.txt` and `dev.txt`. This program makes `cpu.lock` and `dev.lock` from them, for
the one platform on which the tests run (see `PLATFORM`). pip refuses a file with another hash, so neither a changed
upload nor another build of torch can be installed there. Elsewhere `packages.sh` installs the lists themselves, without
hashes. Options are passed on to pip: `--find-links FOLDER` for a CPU wheel of torch, for example.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
PLATFORM = "cpython-3.11 linux x86_64"  # as packages.sh asks for it
HEAD = f"# Made by `make lock` for {PLATFORM}; edit {{list}} instead."


def here() -> str:
    """Return the platform of this interpreter, spelled as `PLATFORM`."""
    version = ".".join(platform.python_version_tuple()[:2])
    return f"{sys.implementation.name}-{version} {sys.platform} {platform.machine()}"


def canonical(name: str) -> str:
    """Return the name of a package in the one form that an index uses."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Return the requirement of each package in a list, such as `attrs==26.1.0`, by its canonical name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {canonical(line.partition("==")[0]): line for line in lines if line}


def hashes(path: Path, options: list[str]) -> dict[str, str]:
    """Return the hash of the file that pip would install for each package of a list; nothing is installed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        flags = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--disable-pip-version-check")
        command = [sys.executable, "-m", "pip", "install", *flags, *options, "--report", report.name, "-r", str(path)]
        subprocess.run(command, check=True)  # noqa: S603  # the arguments are those of whoever runs this
        found = json.loads(Path(report.name).read_bytes())["install"]
    return {
        canonical(each["metadata"]["name"]): each["download_info"]["archive_info"]["hashes"]["sha256"] for each in found
    }


def lock(path: Path, options: list[str]) -> str:
    """Return the text of the lock file of a list."""
    by_name = hashes(path, options)
    lines = [f"{pin} --hash=sha256:{by_name[name]}" for name, pin in pins(path.read_text()).items()]
    return "\n".join([HEAD.format(list=path.name), *lines, ""])


def main() -> int:
    """Write both lock files."""
    if here() != PLATFORM:
        sys.stderr.write(f"lock files are made on {PLATFORM}; this is {here()}\n")
        return 1
    for path in (FOLDER / "cpu.txt", FOLDER / "dev.txt"):
        path.with_suffix(".lock").write_text(lock(path, sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
