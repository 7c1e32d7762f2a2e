"""Bugs to plant where a router judges its workers, and where slots that are not freed are kept."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/routing/outliers.py": (
        Bug("the end of an ejection wakes no request", "if (until := self._breakers[name].until) > now", "if False"),
        Bug("nobody is ever ejected", "bool(breaker.blamed(limits)) and self._eject", "False and self._eject"),
        Bug("all may be ejected", "if others_open + 1 > limits.share_max * suspect.peers:", "if False:"),
        Bug(
            "one that fails with many others is found pair by pair",
            "if partners > 1 and self._eject",
            "if False and self._eject",
        ),
        Bug("one cut way ejects a worker", "if partners > 1 and self._eject", "if partners and self._eject"),
        Bug("a worker answers for what another has failed with it", "self._forget_failures_with(suspect.name)", "pass"),
        Bug("any number of requests tries a worker", "breaker.until or breaker.probed_by is not None", "breaker.until"),
        Bug("whoever ends lets others try", " is not None and breaker.probed_by is by:", " is not None:"),
    ),
    "actors/routing/routed_request.py": (Bug("a request that moves is at both", "self._asking.cancel(", "str("),),
    "actors/routing/failover.py": (
        Bug(
            "a prefill that has sent is well, whatever its decode got",
            "        if worker is route.decode:\n            self.handed_over(route)\n            self.routing.answered(worker.full_name)\n",
            "        self.routing.answered(worker.full_name)\n        if worker is route.decode:\n            self.handed_over(route)\n",
        ),
        Bug("a leg is blamed for how long the other lets it wait", " or unmet:", ":"),
        Bug("a drain uses up a resume", "self._losses += not (unready or planned)", "self._losses += not unready"),
        Bug("what an engine refuses counts against it at once", "if self._refusal is not None:", "if False:"),
    ),
    "actors/routing/route.py": (
        Bug("a place that is let go wakes nobody", "        self._wake()\n", "        pass\n"),
    ),
    "actors/engines/slots.py": (
        Bug("one stuck slot costs the engine", "if len(self.stuck) >= stuck_max:", "if self.stuck:"),
        Bug("a stuck slot is given on", "if call.request.id in slots.stuck:", "if False:"),
    ),
}
