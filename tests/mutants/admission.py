"""Bugs to plant where requests are weighed, admitted and take turns, and where their answers are sent."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/gateway/admission.py": (
        Bug("all requests that are admitted at once begin in one turn", "self._beginning >= BEGIN_MAX", "False"),
        Bug("the turn of a request is never passed on", "if not self._turns.unpark():", "if False:"),
        Bug("the places of a request are not given back", "        self.inside -= waiter.weight\n", "        pass\n"),
        Bug(
            "places that were given to a request that has left are not given back",
            "            if waiter.has_place and not admitted:\n                self._leave(waiter)\n            elif",
            "            if waiter.has_place:\n                pass\n            elif",
        ),
        Bug(
            "a request that leaves the queue stays in it",
            "                self._queue.remove(entry)\n                self._admit()",
            "                self._admit()",
        ),
        Bug("no request waits for admission", "if waiter.weight <= free - kept:", "if True:"),
        Bug(
            "a waiting request is displaced by one of equal priority",
            "self._queue.waiting(newest.owner, newest.priority) + 1 > largest:",
            "self._queue.waiting(newest.owner, newest.priority) > largest:",
        ),
        Bug(
            "requests that wait are not refused by a drain",
            "        for waiter in self._queue:\n            waiter.woken.set()\n",
            "",
        ),
        Bug("a request takes one place, whatever it asks for", "self.inside += waiter.weight", "self.inside += 1"),
        Bug("the places of an owner are not counted", "self._queue.charge(waiter.owner, waiter.weight)", "pass"),
        Bug("no place is reserved for a large request", "                kept = min(", "                min("),
        Bug("an owner may have all places", "if taken and taken + waiter.weight > waiter.owner_max:", "if False:"),
    ),
    "supervisor/gateway/connections.py": (
        Bug(
            "an authenticated connection is closed to make room for others",
            "            self._keys[outbox] = key\n        self._unauthenticated.remove(outbox)\n",
            "            self._keys[outbox] = key\n",
        ),
        Bug(
            "a connection beyond those of its key keeps its place",
            "        owner = self._keys.get(outbox)\n",
            "        owner = self._keys.get(outbox)\n        self._unauthenticated.remove(outbox)\n",
        ),
    ),
    "supervisor/gateway/gateway.py": (
        Bug("a key's requests are counted, not its generations", "key.generating(weight, param)", "key.generating()"),
    ),
    "supervisor/gateway/memory_budgets.py": (
        Bug("a budget leaks", "        self.reserved_bytes -= size\n", "        pass\n"),
        Bug(
            "one key may reserve a whole budget",
            "if before > own and after > self.share_max() * bytes_max:",
            "if False:",
        ),
        Bug("a body in pieces has less room than one in one piece", "if before > own and after", "if before and after"),
    ),
    "supervisor/gateway/websocket/history.py": (
        Bug(
            "the owner of fewest conversations forgets first",
            "        histories = max(self._by_owner.values()",
            "        histories = min(self._by_owner.values()",
        ),
    ),
    "supervisor/gateway/websocket/lanes.py": (
        Bug(
            "the memory of requests that waited is not given back",
            "        for memory in (*(each.memory for each in self._waiting), *(",
            "        for memory in (*(), *(",
        ),
    ),
    "supervisor/sockets/unauthenticated.py": (
        Bug(
            "the newest unauthenticated connection is closed first",
            "next(iter(among), None)",
            "next(reversed(among), None)",
        ),
        Bug(
            "the oldest of an address is the oldest of all",
            "self._all if address is None else self._by_address.get(address, ())",
            "self._all",
        ),
    ),
    "supervisor/gateway/http/head_checks.py": (
        Bug("every port of a host is one origin", " and (page.port or default) == (host.port or default)", ""),
        Bug("a folded header passes", "if FOLDED.search(raw) is not None:", "if False:"),
    ),
    "actors/kit/fair_queue.py": (
        Bug(
            "an owner that was away is owed its turns",
            "self.charge(owner, self._least[0][0] - self.account(owner))",
            "pass",
        ),
        Bug(
            "an account of one who waits changes and its place does not",
            "            insort(self._heads, (-priority, after, turn, owner))\n",
            "            insort(self._heads, (-priority, before, turn, owner))\n",
        ),
    ),
    "actors/kit/priority_inbox.py": (
        Bug("turns are free", "entry.item.line.charge(entry.owner, max(1, self.weight(call.request)))", "pass"),
        Bug(
            "one that left stays",
            "call.on_left = partial(self._remove, entry, group)",
            "call.on_left = partial(self.recheck, group)",
        ),
    ),
    "supervisor/gateway/server.py": (
        Bug(
            "a slow reader's response is cut after close_s",
            "inf if outbox.drop_reason is None else gateway.limits",
            "gateway.limits",
        ),
    ),
    "supervisor/gateway/websocket/session.py": (
        Bug(
            "a drain does not wait for messages that are being parsed",
            "for part in (self._lanes, self._messages))",
            "for part in (self._lanes,))",
        ),
    ),
    "supervisor/node/node.py": (
        Bug("a drain does not wait for slow readers", "await assembly.gateway.connections.wait_idle()", "pass"),
    ),
    "supervisor/gateway/outbox.py": (
        Bug(
            "a cut response of HTTP/1.0 ends without a reset",
            "        if lost and stream.socket.fileno() >= 0:\n",
            "        if False:\n",
        ),
        Bug(
            "bytes that were cut count as sent",
            "            callback(awaited_bytes <= sent_bytes)\n",
            "            callback(True)\n",
        ),
    ),
    "supervisor/gateway/requests.py": (
        Bug("a response that was cut is logged as complete", "            outcome = CUT\n", "            pass\n"),
        Bug("a lack of memory is reported as a bug", "if isinstance(bug, MemoryError):", "if False:"),
    ),
    "protocol/cost.py": (Bug("drafts cost nothing", "max(request.n, request.best_of or 0)", "request.n"),),
}
