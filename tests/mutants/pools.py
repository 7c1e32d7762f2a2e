"""Bugs to plant where requests are mapped to pools, wait for them, and go on to others."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/routing/grid.py": (
        Bug("0 is no target", "if target_ms is None else", "if not target_ms else"),
        Bug(
            "a value at the border of two cells is in the lower one",
            "int((value - self.low) / self.step)",
            "int((value - self.low) / self.step - 1e-12)",
        ),
        Bug(
            "the last cell has the end of the range alone",
            "if value >= self.high:\n            return self.resolution - 1",
            "if value >= self.high:\n            return self.resolution",
        ),
        Bug(
            "pools that are as fast stand in",
            "if priority > priorities[pool]]",
            "if priority >= priorities[pool] and name != pool]",
        ),
        Bug(
            "the fastest pool is tried first", "key=lambda name: priorities[name]", "key=lambda name: -priorities[name]"
        ),
    ),
    "actors/routing/service_levels.py": (
        Bug(
            "decodes go by the target of the first token",
            "hints.itl_target_ms if leg is Leg.DECODE else hints.ttft_target_ms",
            "hints.ttft_target_ms",
        ),
        Bug(
            "the target of the model hides that of the request",
            "self.target_ms if target_ms is None else target_ms",
            "target_ms if self.target_ms is None else self.target_ms",
        ),
    ),
    "actors/routing/routing.py": (
        Bug("requests go to any pool with room", "if request is None or not self.levels.legs:", "if True:"),
        Bug(
            "a full pool is passed without a refusal",
            "found = list[Names | None](up if reach is Reach.FASTER else islice(up, 1)) or [None]",
            "found = list[Names | None](up) or [None]",
        ),
        Bug(
            "a prefill is shared with every decode of other pools",
            "return min(decodes, self.levels.pools(Leg.DECODE) * len(self._workers(Leg.DECODE, names)))",
            "return decodes",
        ),
        Bug(
            "a small pool of decodes may use up a prefill",
            "min(decodes, self.levels.pools(Leg.DECODE) * len(self._workers(Leg.DECODE, names)))",
            "len(self._workers(Leg.DECODE, names))",
        ),
        Bug("a pool that is gone is waited for", "if self._is_up(leg, names, gone))", ")"),
        Bug(
            "an ejected pool is up",
            "            and not (self.outliers and self.outliers.avoided(worker.full_name, now))\n",
            "",
        ),
        Bug(
            "a second opinion is taken from another pool",
            "gone = () if reach is Reach.MAPPED else excluded",
            "gone = excluded",
        ),
        Bug(
            "a refusal leads to no faster pool",
            "reach = Reach.FASTER if lost and not request.said else Reach.NEXT",
            "reach = Reach.NEXT",
        ),
        Bug(
            "a request that has begun goes on in a faster pool",
            "reach = Reach.FASTER if lost and not request.said else Reach.NEXT",
            "reach = Reach.FASTER if lost else Reach.NEXT",
        ),
        Bug(
            "a refusal of one leg leads to another pool of both",
            "sum(place for place, _, _ in legs))",
            "-sum(place for place, _, _ in legs))",
        ),
        Bug(
            "a request moves to another pool",
            "        scope, *_ = self._scopes(request, excluded, Reach.MAPPED)\n",
            "        scope = ANYWHERE\n",
        ),
    ),
    "actors/routing/rebalancing.py": (
        Bug(
            "a full pool holds up the moves of others",
            "key = routing.levels.group(request.remaining), frozenset",
            "key = (), frozenset",
        ),
    ),
    "actors/router.py": (
        Bug(
            "a full pool is looked at once",
            "            while any(inbox.waiting):",
            "            if any(inbox.waiting):",
        ),
        Bug(
            "what came before a router began is not looked at again",
            "        while True:\n            while any",
            "        while True:\n            await refused.park()\n            while any",
        ),
        Bug("nobody looks at a full pool again", "        requests.start_soon(look_again)\n", ""),
    ),
    "actors/kit/priority_inbox.py": (
        Bug(
            "a call that does not fit holds up other groups",
            "                    return call\n",
            "                    return call\n                break\n",
        ),
        Bug(
            "a direct call waits behind those of other groups",
            "        if len(line):\n            return False",
            "        if any(map(len, self._lines.values())):\n            return False",
        ),
        Bug(
            "the calls of each group are bounded by themselves",
            "sum(map(len, self._lines.values())) - len(self._outside)",
            "max(map(len, self._lines.values()), default=0) - len(self._outside)",
        ),
    ),
    "supervisor/cluster/directory.py": (
        Bug(
            "a pool is ranked by the loads at its first use",
            "for names in (None, *self._subsets.get((worker.model, worker.leg), ())):",
            "for names in (None,):",
        ),
    ),
    "supervisor/gateway/gateway.py": (
        Bug(
            "the targets of a key precede those of a request",
            "Targets(request.ttft_target_ms, request.itl_target_ms).or_else(defaults)",
            "defaults.or_else(Targets(request.ttft_target_ms, request.itl_target_ms))",
        ),
        Bug(
            "the targets of a key precede those of headers",
            "record.targets.or_else(key.section.targets)",
            "key.section.targets.or_else(record.targets)",
        ),
    ),
    "supervisor/gateway/websocket/lanes.py": (
        Bug("the targets of a handshake are forgotten", "            targets=self.targets,\n", ""),
    ),
    "supervisor/config/pool_checks.py": (
        Bug(
            "a grid may be shorter than its axis",
            "len(grid.pools) != rows.resolution:",
            "len(grid.pools) > rows.resolution:",
        ),
        Bug(
            "an engine may be in two pools",
            "(other := pools.setdefault(engine, name)) != name or",
            "(other := name) != name or",
        ),
        Bug(
            "a grid may name a pool of another leg",
            'shared != (model, leg):\n        why = f"pool',
            'shared[0] != model:\n        why = f"pool',
        ),
    ),
}
