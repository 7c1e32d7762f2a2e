"""Bugs to plant in announcements, in the identity of models, and in which process of a name is linked."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/cluster/announcements.py": (
        Bug("loads are announced to nodes that do not route", "if node in directory.subscribers:", "if True:"),
        Bug(
            "a node announces its state only once", "            await trio.sleep(every_s())\n", "            return\n"
        ),
    ),
    "supervisor/cluster/workers.py": (
        Bug("the loads that a router gets include its own requests", "self.busy - requests, min(", "self.busy, min("),
    ),
    "supervisor/cluster/directory.py": (
        Bug(
            "every request wakes the tasks that wait for nodes",
            "        self._rerank(worker)\n        if isinstance(",
            "        self.notify()\n        if isinstance(",
        ),
        Bug(
            "tasks are not woken when a name conflict expires",
            "with trio.move_on_at(min((until for _, until in self.name_conflicts.values() if now < until), default=inf)):",
            "with trio.move_on_at(inf + now):",
        ),
    ),
    "supervisor/cluster/model_identity.py": (
        Bug("every name of a model that was ever announced is kept", "if not self._is_named(model):", "if False:"),
        Bug("the weights that were served last are forgotten", "if not self._is_named(model):", "if True:"),
        Bug("workers of other weights are asked", "if weights is None or weights == served or", "if True or"),
        Bug(
            "of equally many the newer weights are served",
            "(len(holders[weights]), weights == before)",
            "(len(holders[weights]), weights != before)",
        ),
        Bug("workers that are down go on counting", "if offer.up and not state.draining and mismatch", "if mismatch"),
        Bug("a worker that was rejected once is never accepted again", "            self._changed.add(model)\n", ""),
    ),
    "actors/routing/failover.py": (
        Bug(
            "an answer goes on with other weights",
            "if not (sent and self.weights not in {None, ",
            "if not (False and self.weights not in {None, ",
        ),
    ),
    "supervisor/cluster/carried_links.py": (
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
