"""Bugs to plant where failures are kept in their subtree: supervision, descriptors, the sweep."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/supervision/supervise.py": (
        Bug(
            "children wait for each other though they need nothing",
            "        if self._tree.strategy is Strategy.ONE_FOR_ONE and child.name in self._started_once:\n            return True\n",
            "",
        ),
        Bug(
            "a child starts before what it needs",
            "        return not missing and all(life is None or life.ended or life.is_settled for life in lives)",
            "        return True",
        ),
        Bug(
            "a child stops before what needs it",
            "                if not needed and self._is_stopped(",
            "                if self._is_stopped(",
        ),
        Bug(
            "crashes do not lengthen the wait",
            "if life.ready_at is None or self._tree.backoff.crashes:",
            "if life.ready_at is None:",
        ),
        Bug(
            "a quiet time is forgotten",
            "            self._failures_in_a_row.pop(life.child.name, None)\n",
            "            pass\n",
        ),
        Bug(
            "a tree that never gives up is waited for all the same",
            "            self._parent.retries()\n        if life.child",
            "            pass\n        if life.child",
        ),
        Bug(
            "one that is too slow to start is not started again",
            "                return life, error\n",
            "                continue\n",
        ),
    ),
    "supervisor/supervision/tree.py": (
        Bug(
            "what is needed by way of others is not",
            "frozenset(direct).union(*(needs[name] for name in direct))",
            "frozenset(direct)",
        ),
        Bug(
            "stopping takes no longer than its slowest",
            "            ended_s[child.name] = begins_s + child.stop_within_s\n",
            "            ended_s[child.name] = child.stop_within_s\n",
        ),
    ),
    "supervisor/sockets/descriptor_reserve.py": (
        Bug(
            "new connections use the reserve",
            "            if self.reserve.fill():\n                try:",
            "            if True:\n                try:",
        ),
        Bug(
            "new connections share a reserve that is lent",
            "            while not self.lending and len",
            "            while len",
        ),
        Bug(
            "refused connections stay open", "                    stream.socket.close()\n", "                    pass\n"
        ),
        Bug(
            "nobody waits between two refusals",
            "            await trio.sleep(REFUSE_INTERVAL_S)\n",
            "            await trio.sleep(0)\n",
        ),
    ),
    "supervisor/processes/run_folder.py": (
        Bug(
            "the sweep asks nobody whose a folder is",
            "        if not _is_ours(os.fstat(folder)):\n            return False\n",
            "",
        ),
        Bug("the sweep enters what others may", "found.st_uid == os.geteuid() and stat", "stat"),
        Bug(
            "a folder that is made again is held by nobody",
            "                os.dup2(lock, self.lock, inheritable=False)\n",
            "                pass\n",
        ),
        Bug("a host's folder cannot be made again", "mkdir(parents=True, exist_ok=True)", "exists()"),
        Bug("a folder of others is taken", "            if not _is_ours(os.fstat(created)):", "            if False:"),
        Bug("a folder of others is emptied", "        if _is_ours(os.fstat(folder)):", "        if True:"),
    ),
    "supervisor/control/unix_socket.py": (
        Bug(
            "a description that has gone is not made again",
            "for name, identity in self._identities.items()",
            "for name, identity in self._identities.items() if name == SOCKET",
        ),
        Bug(
            "a socket that is made again cuts running requests", "listeners, handler_nursery=operators))", "listeners))"
        ),
        Bug(
            "a check that is not possible ends the node",
            "with suppress(OSError):  # unknown at this",
            "if True:  # unknown at this",
        ),
    ),
    "actors/engines/sglang/shared_memory.py": (
        Bug(
            "the sweep follows links",
            "os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
            "os.O_RDONLY | os.O_CLOEXEC",
        ),
        Bug(
            "shared memory of others is removed",
            "stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()",
            "stat.S_ISREG(status.st_mode)",
        ),
        Bug("shared memory of any name is removed", " and name.startswith(MADE_BY_HOSTS)", ""),
    ),
    "supervisor/supervision/registration.py": (
        Bug(
            "a failure is told for ever",
            "        self._published, self.failure = True, None\n",
            "        self._published = True\n",
        ),
        Bug("a zygote that was killed fails who waits for the next", "at_start=not self._published", "at_start=True"),
    ),
    "supervisor/node/assembly.py": (
        Bug(
            "one engine that cannot start ends its node",
            "or not failures or len(failures) < len(every)",
            "or not failures",
        ),
        Bug("a gateway falls with its own engine", "if serves_others or not", "if not"),
    ),
}
