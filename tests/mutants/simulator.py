"""Bugs to plant that the simulator must notice by what goes wrong alone in a seed, whoever else does."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/routing/failover.py": (
        Bug(
            "an engine that fails everything is not blamed for it",
            "elif late or isinstance(error, InternalError):",
            "elif late:",
        ),
        Bug(
            "one engine that died under a request counts as two",
            "        self._crashes += isinstance(lost, EngineLost)\n",
            "        self._crashes += 2 * isinstance(lost, EngineLost)\n",
        ),
        Bug(
            "a pair that fails to hand over is not blamed for it",
            "            self.routing.failed(route.name, error)\n",
            "            pass\n",
        ),
    ),
    "actors/routing/routing.py": (
        Bug(
            "an ejected pair is asked while the others are busy",
            "if not self.outliers or self._has_eligible_pair(excluded, now, scope):",
            "if not self.outliers:",
        ),
    ),
    "actors/routing/outliers.py": (
        Bug(
            "a worker that was ejected is never asked again",
            "return now < breaker.until or breaker.probed_by is not None",
            "return True",
        ),
    ),
    "actors/kit/priority_inbox.py": (
        Bug(
            "what an owner is given is not put on its account",
            "entry.item.line.charge(entry.owner, max(1, self.weight(call.request)))",
            "pass",
        ),
    ),
    "actors/engines/slots.py": (
        Bug("one slot that is kept costs the engine", "if len(self.stuck) >= stuck_max:", "if self.stuck:"),
        Bug(
            "a slot that was kept is never used again",
            "        await slots.wait_released(call.request.id)\n",
            "        await slots.wait_released(call.request.id)\n        return\n",
        ),
    ),
    "supervisor/cluster/mesh.py": (
        Bug(
            "a second process that is dialed is not told that it is one",
            "if peer not in self.carried.dialed or self.carried.name_conflict(peer, incarnation) is not None:",
            "if peer not in self.carried.dialed:",
        ),
    ),
    "supervisor/cluster/carried_links.py": (
        Bug(
            "a second process of a node's name takes the place of the first",
            "if before is None or before.incarnation == incarnation or before.link.silent_s >= self.section().silent_s:",
            "if before is None or not before.link.lost:",
        ),
    ),
    "supervisor/links/heartbeat.py": (
        Bug(
            "a node that stands still is lost, whatever its kernel acknowledges",
            "if acknowledged_s is None or acknowledged_s > limits.heartbeat_s or not may_stall:",
            "if not self.stalled:",
        ),
    ),
    "supervisor/links/asking.py": (
        Bug(
            "whoever has asked a node that stands still waits for it",
            "        self.fail_all(partial(self.lost_error, detail))\n",
            "",
        ),
    ),
    "supervisor/supervision/supervise.py": (
        Bug(
            "whoever waits for a tree waits for one that is not up and tries again",
            "            self._parent.retries()\n",
            "            pass\n",
        ),
    ),
    "supervisor/gateway/http/exchange.py": (
        Bug(
            "a response that its client got in part is counted as complete",
            "None if whole and not lost else gateway.cut_reason(outbox)",
            "None",
        ),
    ),
    "supervisor/gateway/requests.py": (
        Bug(
            "a response that its client got in part is not counted as cut",
            "            self.metrics.response_incomplete(record.api, cut)\n",
            "",
        ),
    ),
    "supervisor/gateway/admission.py": (
        Bug(
            "the places of an owner are not charged to its account",
            "        self._queue.charge(waiter.owner, waiter.weight)\n",
            "",
        ),
        Bug(
            "a new request for a full queue is refused, however few its owner has in it",
            "        last = self._queue.last_of_largest()\n",
            "        last = newest\n",
        ),
    ),
}
