"""Bugs to plant in what nodes tell each other, and in which process of a name is believed."""

from __future__ import annotations

from tests.planted import Bug, Bugs

TELLING: Bugs = {
    "supervisor/telling.py": (
        Bug("a node tells only once how it is", "            await trio.sleep(every_s())\n", "            return\n"),
    ),
    "supervisor/endpoints.py": (
        Bug("a router is told back what it asks itself", "self.busy - requests, min(", "self.busy, min("),
    ),
    "supervisor/directory.py": (
        Bug(
            "every request wakes whoever waits for nodes",
            "        self._moved(worker)\n        if isinstance(",
            "        self.changed.unpark_all()\n        if isinstance(",
        ),
        Bug("all are told every load", "if node in self._hearers:", "if True:"),
    ),
    "supervisor/links.py": (
        Bug(
            "of two processes of one name the newer takes the link",
            "if before is None or before.incarnation",
            "if True or before.incarnation",
        ),
    ),
    "protocol/greeting.py": (
        Bug("a proof is not bound to the process", "listens.nonce, *names, *lives))", "listens.nonce, *names))"),
    ),
}
