"""The planted bugs of `bugs.txt`, read.

A line that begins with `#` names a class of bugs. A row is `FILE: NAME`, then optionally `@ FILES` (tests that notice the bug
though they are not the file's own), the text to replace (`-`) and the text to write instead (`+`). Without a `+` the text
is removed. The text is the bare code: a `-` may be any part of a line, and several make one text of several lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

TABLE = Path(__file__).with_name("bugs.txt")


@frozen
class Bug:
    """One planted bug."""

    kind: str
    path: str  # of the file that it is planted in
    name: str
    tests: tuple[str, ...]  # beside those that the file's path gives
    old: str
    new: str

    def planted_in(self, text: str) -> str | None:
        """Return the text of a file with the bug in it, or None if the row is stale.

        A row is stale if its text is not in the file once, or if the bug does not compile: then a test that imports the
        file fails, and has noticed nothing.
        """
        if text.count(self.old) != 1:
            return None
        planted = text.replace(self.old, self.new)
        try:
            compile(planted, self.path, "exec")
        except SyntaxError:
            return None
        return planted


def bugs(table: Path = TABLE) -> Iterator[Bug]:
    """Read the table."""
    kind, rows = "", list[tuple[str, str, list[str]]]()
    for line in table.read_text().splitlines():
        if line.startswith("#"):
            kind = line.removeprefix("# ").partition(":")[0]
        elif line.startswith(("@", "-", "+")):
            rows[-1][2].append(line)
        elif line:
            rows.append((kind, line, []))
    for kind, head, lines in rows:
        path, _, name = head.partition(": ")
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        tests = tuple(word for line in lines if line[0] == "@" for word in line[1:].split())
        yield Bug(kind, path, name, tests, old, new)
