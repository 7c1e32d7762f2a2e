"""More bugs to plant: in how a file is read, and in how an operator reaches a node."""

from __future__ import annotations

from tests.planted import Bug, Bugs

CONFIG: Bugs = {
    "supervisor/partial.py": (
        Bug(
            "what follows from a mistake is told as another",
            "or path in mistake.said",
            "and path in mistake.said",
        ),
        Bug("a mistake keeps the rest of its file from being judged", "ROUNDS_MAX = 4", "ROUNDS_MAX = 1"),
    ),
    "supervisor/private_files.py": (
        Bug(
            "a secret that others may write is taken",
            "if mode & stat.S_IWOTH:\n        return",
            "if False:\n        return",
        ),
    ),
    "supervisor/files.py": (
        Bug("a pipe is waited for", "os.O_RDONLY | os.O_NONBLOCK", "os.O_RDONLY"),
        Bug("what is no file is read", "if not stat.S_ISREG(status.st_mode):", "if False:"),
    ),
    "supervisor/__main__.py": (
        Bug("every collection looks through what was imported", "    gc.freeze()", "    gc.isenabled()"),
    ),
    "supervisor/metrics.py": (
        Bug("a scrape is written in one turn", "SAMPLES_A_PIECE = 100", "SAMPLES_A_PIECE = 100_000"),
        Bug(
            "nobody runs between two pieces of a scrape",
            "written.append(piece)\n            await trio.lowlevel.checkpoint()",
            "written.append(piece)",
        ),
        Bug("each piece of a family begins it anew", "if family.name != before else", "if family.name else"),
    ),
    "supervisor/operate.py": (
        Bug(
            "a broken file keeps operators from the nodes of their host",
            "    if not folders:\n        raise wrong",
            "    if wrong:\n        raise wrong",
        ),
    ),
    "supervisor/toml_lines.py": (
        Bug(
            "keys after a long string are told at a wrong line",
            "return bisect_right(self._starts, at)",
            "return self.text.count('\\n', 0, min(at, 40)) + 1",
        ),
    ),
    "supervisor/doors/door.py": (
        Bug(
            "a certificate is read in a turn of the event loop",
            "await read(self.certificate.context)",
            "self.certificate.context()",
        ),
    ),
    "supervisor/reload.py": (
        Bug("who leaves a reload leaves half of it", "move_on_after(REST_S, shield=True)", "move_on_after(REST_S)"),
        Bug("reloads overtake each other", "async with self._one:", "async with trio.Lock():"),
        Bug(
            "keys are not read anew where the file is wrong",
            "if (door := self.house.door or self.house.scraped) is not None:\n            # Whoever",
            "if not told.refused and (door := self.house.door or self.house.scraped) is not None:\n            # Whoever",
        ),
    ),
}
