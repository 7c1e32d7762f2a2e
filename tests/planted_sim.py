"""Bugs to plant that the simulator must notice by what goes wrong alone in a seed, whoever else does."""

from __future__ import annotations

from tests.planted import Bug, Bugs

SIM: Bugs = {
    "actors/routing/journey.py": (
        Bug(
            "an engine that fails everything is not blamed for it",
            "elif isinstance(error, DeadlineExceeded | Internal) and not isinstance(error, Preempted):",
            "elif isinstance(error, DeadlineExceeded) and not isinstance(error, Preempted):",
        ),
        Bug(
            "an engine that died under a request is asked for it again",
            "            self._dead.add(worker.load.name)\n        self._lost.add(worker.load.name)\n",
            "            pass\n",
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
    "supervisor/run.py": (
        Bug(
            "whoever waits for a tree waits for one that is not up and tries again",
            "            self._above.tries_again()\n",
            "            pass\n",
        ),
    ),
    "supervisor/doors/exchange.py": (
        Bug(
            "an answer that its client got in part is counted as whole",
            "None if whole and not lost else door.why_cut(outbox)",
            "None",
        ),
    ),
    "supervisor/doors/asking.py": (
        Bug(
            "an answer that its client got in part is not counted as cut",
            "            self.metrics.answer_cut(counted.door, cut)\n",
            "",
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
