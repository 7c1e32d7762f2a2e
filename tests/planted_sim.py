"""Bugs to plant that the simulator must notice by what it does alone (`tests/sim/alone.py`), whoever else does."""

from __future__ import annotations

from tests.planted import Bug, Bugs

SIM: Bugs = {
    "actors/routing/journey.py": (
        Bug(
            "an engine that fails everything is not blamed for it",
            "elif isinstance(error, DeadlineExceeded | Internal) and not isinstance(error, Preempted):",
            "elif isinstance(error, DeadlineExceeded) and not isinstance(error, Preempted):",
        ),
    ),
    "actors/routing/outliers.py": (
        Bug(
            "a worker that was set aside is never asked again",
            "return now < breaker.until or breaker.trying",
            "return True",
        ),
    ),
    "actors/_fair.py": (
        Bug(
            "whoever has had its turn keeps its place before equals",
            "turn = next(self._numbers) if amount > 0 else of.turn",
            "turn = of.turn",
        ),
    ),
    "actors/_queue.py": (
        Bug(
            "what an owner is given is not put on its account",
            "self._line.charge(entry.owner, max(1, self.weight(call.request)))",
            "pass",
        ),
    ),
    "actors/decode.py": (
        Bug(
            "one slot that is kept costs the engine",
            "if len(self.kept) >= most:",
            "if self.kept:",
        ),
        Bug(
            "a slot that was kept is never used again",
            "        await slots.wait_given_back(call.request.id)\n",
            "        await slots.wait_given_back(call.request.id)\n        return\n",
        ),
    ),
    "supervisor/doors/gate.py": (
        Bug(
            "what an owner holds inside is not put on its account",
            "            self._line.charge(waiter.owner, waiter.weight)\n",
            "",
        ),
        Bug(
            "whoever comes to a full line hears no, however few it has in it",
            "        last = self._line.last_of_largest()\n",
            "        last = newest\n",
        ),
    ),
}
