"""Bugs to plant where ranks of one engine are told apart, and where KV memory bounds what a rank is given."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "protocol/messages.py": (
        Bug(
            "requests drawn one after the other meet in one room",
            "% ((ROOM_MAX + 1) // ranks) * ranks",
            "// ranks * ranks",
        ),
        Bug("a room is that of the first rank", "// ranks) * ranks + rank", "// ranks) * ranks"),
        Bug("a room has more bits than SGLang's", "drawn % ((ROOM_MAX + 1) // ranks) * ranks", "drawn * ranks"),
        Bug(
            "the load of an engine is that of its first rank",
            "cls(running, waiting, kv_tokens_used, tuple(counts))",
            "cls(*astuple(counts[0]), tuple(counts))",
        ),
    ),
    "protocol/cluster.py": (
        Bug("every rank is the first one", "    return engine, int(rank)", "    return engine, 0"),
        Bug("a rank is offered with a name that is none", "(0|[1-9][0-9]{{0,3}}))?", "[0-9-]*)?"),
    ),
    "actors/engines/request_check.py": (
        Bug("a rank below the first is asked", "if not 0 <= request.rank < ranks:", "if request.rank >= ranks:"),
        Bug("a rank behind the last is asked", "if not 0 <= request.rank < ranks:", "if request.rank < 0:"),
    ),
    "actors/engines/kv_admission.py": (
        Bug("what is cached needs memory", "leg, request.cached_tokens)", "leg, 0)"),
        Bug("parts of pages are free", "-(-needed // page_size) * page_size", "needed"),
        Bug("memory is never given back", "            self.held.discard(key)\n", ""),
        Bug("memory that is given back is not looked at", "            recheck()\n", ""),
    ),
    "protocol/cost.py": (
        Bug("the answer needs no memory", "if leg is not Leg.PREFILL:", "if False:"),
        Bug("a prefill needs memory for the answer", "if leg is not Leg.PREFILL:", "if True:"),
        Bug("a peer's cached tokens are believed", "min(max(0, cached), prompt)", "cached"),
        Bug(
            "long answers count in full",
            "min(generate.sampling.tokens_max, ANSWER_TOKENS_MAX)",
            "generate.sampling.tokens_max",
        ),
    ),
    "actors/engines/slots.py": (
        Bug(
            "what a request held is held after its end",
            "    slots.end_request()\n    on_released()\n",
            "    slots.end_request()\n",
        ),
    ),
    "actors/decode.py": (
        Bug("a rank takes the calls of others", "receive(fits, group)", "receive(fits)"),
        Bug("a decode asks for no memory", " and memory.fits(request)", ""),
        Bug("only the first rank is served", "for slots in ranks[1:]:", "for slots in ranks[:0]:"),
    ),
    "actors/prefill.py": (
        Bug("a rank of a prefill takes the calls of others", "receive(fits, group)", "receive(fits)"),
        Bug("a prefill asks for no memory", " and memory.fits(request)", ""),
        Bug("only the first rank of a prefill is served", "for slots in ranks[1:]:", "for slots in ranks[:0]:"),
    ),
    "actors/routing/kv.py": (
        Bug(
            "a prefix of a rank counts for all",
            "computing, holder = self.expected.get(load.name, 0), engine_and_rank(load.name)",
            "computing, holder = self.expected.get(load.name, 0), (engine_and_rank(load.name)[0], 0)",
        ),
        Bug(
            "a rank with a prefix is not looked for",
            '    return candidates.find(f"{engine}{RANK_MARK}{rank}")',
            "    return candidates.find(engine)",
        ),
        Bug("a rank that there is not stands for the engine", "if not rank and (load", "if (load"),
    ),
    "actors/routing/routed_request.py": (Bug("a pair meets in any room", "if prefill.ranks > 1:", "if False:"),),
    "actors/routing/failover.py": (
        Bug("a request goes on at another rank of the engine that it crashed", "if engine == name:", "if True:"),
    ),
    "supervisor/cluster/workers.py": (
        Bug(
            "a request does not say for which rank it is",
            "    return evolve(request, rank=rank)\n",
            "    return request\n",
        ),
        Bug(
            "a rank of another node is asked for by its own name",
            "async with link.ask(request, credit, self.engine_name) as replies:",
            "async with link.ask(request, credit, self.name) as replies:",
        ),
    ),
    "supervisor/cluster/guarded_worker.py": (
        Bug(
            "requests of others are all for the first rank", "(self.worker, *self.others)[request.rank]", "self.worker"
        ),
        Bug("a peer's rank is believed", "            check_rank(request, 1 + len(self.others))\n", ""),
    ),
    "supervisor/cluster/directory.py": (
        Bug(
            "ranks of one engine stand in for each other",
            "worker.ranks if worker.engine.current",
            "1 if worker.engine.current",
        ),
        Bug(
            "an engine is idle when its first rank is",
            "if worker.engine_name == name)",
            "if worker.engine_name == name and not worker.rank)",
        ),
    ),
    "supervisor/cluster/announcements.py": (
        Bug("an older node is offered ranks", "(state.takes_ranks or worker.ranks == 1)", "True"),
    ),
    "supervisor/cluster/engine_checks.py": (
        Bug("a rank behind the last is offered", "[1] >= engine.data_parallel:", "[1] > engine.data_parallel:"),
    ),
    "supervisor/cluster/engine_control.py": (
        Bug("a load of more ranks than there are is shown", " and len(answer.by_rank) <= ranks[name]", ""),
        Bug("the load of an engine is told as one", "    ranks = load.by_rank[:RANKS_MAX]", "    ranks = ()"),
    ),
    "supervisor/engines/children.py": (
        Bug(
            "the first rank alone is watched while idle",
            "for rank in range(section.data_parallel) if",
            "for rank in range(1) if",
        ),
        Bug(
            "all ranks wait in one line",
            "request_inbox(queue_max, lambda request: request.rank)",
            "request_inbox(queue_max)",
        ),
        Bug("memory is no bound", "if section.admits_by_memory else KvAdmission(),", "if False else KvAdmission(),"),
    ),
    "actors/kit/priority_inbox.py": (
        Bug(
            "a call wakes the receivers of all ranks",
            "for each in tuple(self._changed) if group is None else (group, None):",
            "for each in tuple(self._changed):",
        ),
    ),
    "actors/canary.py": (Bug("every canary asks the first rank", "        rank=rank,\n", ""),),
    "actors/engines/simulated/engine.py": (
        Bug("all requests are computed by the first rank", "self._batches[request.rank]", "self._batches[0]"),
        Bug(
            "the load is that of the first rank",
            "EngineLoads(tuple(batch.rank_load() for batch in self._batches))",
            "EngineLoads((self._batches[0].rank_load(),))",
        ),
    ),
    "actors/engines/simulated/batch.py": (
        Bug(
            "a very long answer is preempted though there is memory",
            "or self.memory.extend(held.lease, needed)",
            "or False",
        ),
        Bug(
            "a preempted request begins twice",
            "            if held.given:\n                self._emit(held, update)\n                continue\n",
            "",
        ),
        Bug(
            "a preempted request waits behind all others",
            "                self.waiting.move_to_end(shortest.request.id, last=False)\n",
            "",
        ),
        Bug(
            "a simulated answer without max_tokens takes all memory",
            "min(self._tokens_max(held) - held.given, ANSWER_TOKENS_MAX)",
            "self._tokens_max(held) - held.given",
        ),
        Bug("all blocks are those of the first rank", "CacheEvents(rank=self.rank)", "CacheEvents()"),
    ),
    "supervisor/node/pools.py": (
        Bug("a pool has the first rank alone", "for rank in range(section.data_parallel):", "for rank in range(1):"),
    ),
}
