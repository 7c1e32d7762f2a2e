"""A scratch copy of the product, to which a test adds what a recipe of CONTRIBUTING.md names, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

from attrs import Factory, define

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("protocol", "actors", "supervisor")
CLUSTER = """
[gateway]
port = 0
[node.main]
listen = "127.0.0.1:7401"
[model.tiny]
path = "{tiny}"
[engine.tiny]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""


@define
class Scratch:
    """The copy, and the files that were added to it or changed in it."""

    folder: Path
    touched: set[str] = Factory(set)

    def add(self, path: str, text: str) -> None:
        """Write a file that is not there."""
        file = self.folder / path
        assert not file.exists(), path
        file.write_text(dedent(text).lstrip())
        self.touched.add(path)

    def insert(self, path: str, beginning: str, text: str) -> None:
        """Insert text, as far to the right, above the one line of a file that begins so."""
        file = self.folder / path
        before = file.read_text()
        assert before.count(f"\n{beginning}") == 1, f"not one line of {path} begins with {beginning!r}"
        more = indent(dedent(text).lstrip("\n"), beginning[: len(beginning) - len(beginning.lstrip())])
        file.write_text(before.replace(f"\n{beginning}", f"\n{more}{beginning}"))
        self.touched.add(path)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run Python in the copy, with the helpers of the tests; return the exit code and all that it wrote."""
        environment = {**os.environ, "PYTHONPATH": f"{self.folder}:{ROOT}", "PYTHONSAFEPATH": "1"}
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    def program(self, text: str) -> str:
        """Run a program that must end well, and return what it has written."""
        code, written = self.run("-c", dedent(text))
        assert code == 0, written
        return written


def scratch(folder: Path) -> Scratch:
    """Return a copy of the product in a folder."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return Scratch(folder)
