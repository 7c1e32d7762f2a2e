"""Bugs that the simulator notices by its oracles of prefix caches, canaries and pools, whatever else may notice them."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/engines/simulated/kv_memory.py": (
        Bug(
            "the first page of a prompt is not told of",
            "            self.events.stored(digest, lease.shared[-1] if lease.shared else None, tokens)\n",
            "            if lease.shared:\n                self.events.stored(digest, lease.shared[-1], tokens)\n",
        ),
    ),
    "actors/engines/simulated/held_request.py": (
        Bug(
            "an engine finds what another tenant has computed",
            "root = root_digest(self.request.cache_salt)\n",
            'root = b""\n',
        ),
    ),
    "actors/engines/block_log.py": (
        Bug(
            "the list of all blocks has those that were removed",
            "                    for number in event.hashes:\n                        others.pop(number, None)",
            "                    pass",
        ),
    ),
    "actors/prefix_subscriber.py": (
        Bug(
            "a worker that comes back is not followed",
            "            self.worker = worker\n            self._changed.unpark_all()\n",
            "            self.worker = worker\n",
        ),
        Bug(
            "what was forgotten is not asked for again",
            '        self.index.forget(self.name)\n        self.life, self.since = "", 0',
            "        self.index.forget(self.name)",
        ),
        Bug(
            "a liar fills the index until its stream has ended",
            "                self._forget()  # at once: its",
            "                # its",
        ),
        Bug("a liar may fill the index", "if self.index.count(self.name, rank) > blocks_max:", "if False:"),
    ),
    "actors/routing/prefix_index.py": (
        Bug(
            "what one worker has dropped is gone for all",
            "                if left := before & ~bit:\n                    shard[number] = left\n                else:",
            "                if True:",
        ),
    ),
    "actors/routing/kv.py": (
        Bug(
            "whoever has a part is expected to have all",
            "        return min(has, self.reusable // size) * size",
            "        return self.reusable // size * size",
        ),
    ),
    "actors/text/prompt_blocks.py": (
        Bug(
            "a router knows of no tenants",
            "partial(_blocks, tokens, page_sizes, first.cache_salt)",
            "partial(_blocks, tokens, page_sizes, None)",
        ),
    ),
    "actors/canary.py": (
        Bug("a frozen engine has all the time", "    return generation.over.is_set()\n", "    return True\n"),
    ),
    "actors/routing/service_levels.py": (
        Bug(
            "all pools have one queue",
            "        return tuple([pools.pool(leg, request) for leg, pools in self.legs.items()])\n",
            "        return ()\n",
        ),
    ),
}
