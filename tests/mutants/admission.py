"""Bugs to plant where requests are weighed, admitted and take turns, and where their answers are sent."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/gateway/admission.py": (
        Bug("places at the gate leak", "        self.inside -= waiter.weight\n", "        pass\n"),
        Bug(
            "places that are given to one who has left leak",
            "            if waiter.has_place and not admitted:\n                self._leave(waiter)\n            elif",
            "            if waiter.has_place:\n                pass\n            elif",
        ),
        Bug(
            "whoever leaves the line stays in it",
            "                self._queue.remove(entry)\n                self._admit()",
            "                self._admit()",
        ),
        Bug("nobody waits at the gate", "if waiter.weight <= free - kept:", "if True:"),
        Bug(
            "whoever waits is displaced by an equal",
            "self._queue.waiting(newest.owner, newest.priority) + 1 > most:",
            "self._queue.waiting(newest.owner, newest.priority) > most:",
        ),
        Bug(
            "those who wait never hear of a drain",
            "        for waiter in self._queue:\n            waiter.woken.set()\n",
            "",
        ),
        Bug("a request weighs one, whatever it asks for", "self.inside += waiter.weight", "self.inside += 1"),
        Bug("what an owner holds inside is not counted", "self._queue.charge(waiter.owner, waiter.weight)", "pass"),
        Bug("a large request is passed for ever", "                kept = min(", "                min("),
        Bug("an owner may hold everything", "if taken and taken + waiter.weight > waiter.owner_max:", "if False:"),
    ),
    "supervisor/gateway/connections.py": (
        Bug(
            "a connection that has shown a key is closed to make room for others",
            "        self._unauthenticated.remove(outbox)\n        owner",
            "        owner",
        ),
    ),
    "supervisor/gateway/gateway.py": (
        Bug("a key's requests are record, not its generations", "key.generating(weight, param)", "key.generating()"),
    ),
    "supervisor/gateway/memory_budgets.py": (
        Bug("a budget leaks", "        self.reserved_bytes -= size\n", "        pass\n"),
        Bug("one key may hold a whole budget", "if before and after > self.share_max() * bytes_max:", "if False:"),
    ),
    "supervisor/gateway/websocket/history.py": (
        Bug(
            "whoever remembers least forgets first",
            "        most = max(self._by_owner.values()",
            "        most = min(self._by_owner.values()",
        ),
    ),
    "supervisor/gateway/websocket/lanes.py": (
        Bug(
            "what waited is held for ever",
            "        for memory in (*(each.memory for each in self._waiting), *(",
            "        for memory in (*(",
        ),
    ),
    "supervisor/sockets/unauthenticated.py": (
        Bug("the newest stranger goes first", "next(iter(among), None)", "next(reversed(among), None)"),
        Bug(
            "the strangers of one address are all of them",
            "self._all if address is None else self._by_address.get(address, ())",
            "self._all",
        ),
    ),
    "supervisor/gateway/http/head_checks.py": (
        Bug(
            "every port of a host is one origin",
            " and (page.port or default) == (host.port or default)",
            "",
        ),
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
        Bug("turns are free", "self._line.charge(entry.owner, max(1, self.weight(call.request)))", "pass"),
        Bug("one that left has its turn", "                if not left:", "                if True:"),
    ),
    "supervisor/gateway/server.py": (
        Bug(
            "a slow reader's answer is cut soon",
            "inf if outbox.drop_reason is None else gateway.limits",
            "gateway.limits",
        ),
    ),
    "supervisor/gateway/websocket/session.py": (
        Bug(
            "a drain does not see what is being read",
            "for part in (self._lanes, self._messages))",
            "for part in (self._lanes,))",
        ),
    ),
    "supervisor/node/node.py": (
        Bug("a drain does not wait for slow readers", "await assembly.gateway.connections.wait_idle()", "pass"),
    ),
    "supervisor/gateway/outbox.py": (
        Bug(
            "a cut answer ends orderly",
            "        if lost and stream.socket.fileno() >= 0:\n",
            "        if False:\n",
        ),
        Bug(
            "what was cut counts as taken",
            "            callback(awaited_bytes <= sent_bytes)\n",
            "            callback(True)\n",
        ),
    ),
    "supervisor/gateway/requests.py": (
        Bug("an answer that was cut is logged as whole", "            outcome = CUT\n", "            pass\n"),
        Bug("to have no memory left is a bug", "if isinstance(bug, MemoryError):", "if False:"),
    ),
    "protocol/cost.py": (Bug("drafts cost nothing", "max(request.n, request.best_of or 0)", "request.n"),),
}
