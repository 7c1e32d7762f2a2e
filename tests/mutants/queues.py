"""Bugs to plant where prompts wait outside an engine, so that keys take turns."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/kit/pending_prefill.py": (
        Bug("an engine has any number of prompts", "self.tokens + size <= self.tokens_max", "True"),
        Bug("a longer prompt never enters", "return not self.tokens or not", "return not"),
        Bug(
            "any number of prompts follow a longer one",
            "self.tokens - self._longer_tokens + size",
            "size",
        ),
        Bug(
            "the tokens of longer prompts are counted for ever",
            "            self._longer_tokens -= size\n",
            "            pass\n",
        ),
        Bug(
            "a prompt that fits with others lets as many follow",
            "return 0 < self.tokens_max < size",
            "return 0 < self.tokens_max <= size",
        ),
        Bug(
            "without a bound every prompt is longer",
            "return 0 < self.tokens_max < size",
            "return self.tokens_max < size",
        ),
    ),
    "actors/kit/priority_inbox.py": (
        Bug("what does not fit is passed", "if fits(entry.item.call.request):", "if True:"),
        Bug(
            "whoever comes while there is no room is not looked at",
            "        self.recheck(group)  # even if",
            "        pass  # even if",
        ),
        Bug(
            "who leaves the head of the line is waited for",
            "        self._take(entry)\n        self.recheck(group)\n",
            "        self._take(entry)\n",
        ),
    ),
    "actors/engines/slots.py": (
        Bug(
            "a longer prompt that comes later extends the time of an answer",
            "pace.started_at, pace.last_at = pace.began_at, now",
            "pace.last_at = now",
        ),
        Bug(
            "a prompt that never began is pending for ever",
            "    finally:\n        on_begun()\n",
            "    finally:\n        pass\n",
        ),
        Bug(
            "a prompt is pending until its answer ends",
            "            on_begun()\n            slots",
            "            slots",
        ),
    ),
    "actors/prefill.py": (
        Bug(
            "a prefill takes any number of prompts",
            "await slots.free.acquire()",
            "await trio.lowlevel.checkpoint()",
        ),
    ),
    "actors/decode.py": (
        Bug(
            "a short prompt waits outside, where its prefix is evicted for the long one before it",
            "pending.fits_behind_longer(",
            "pending.fits(",
        ),
        Bug(
            "a prompt behind a longer one is late when that one is",
            "                ended_at = trio.current_time()\n",
            "                pass\n",
        ),
        Bug(
            "whoever begins gives those behind a longer prompt their time again",
            "            if pending.is_longer(call.request.uncached_tokens):\n",
            "            if True:\n",
        ),
        Bug("nobody looks again when a prompt has begun", "            recheck()", "            pass"),
    ),
    "actors/routing/load.py": (
        Bug("a router gives a worker any number of prompts", " or 0 < self.pending_max <= self.pending", ""),
    ),
    "actors/routing/routed_request.py": (
        Bug(
            "a prefill's prompts are pending until they are handed over",
            "prefill.begun(request.id)",
            "pass",
            harmless="its answer ends with its first token",
        ),
    ),
    "actors/routing/reservations.py": (
        Bug("one decode has all of a prefill", "prompts.tokens * decodes >= prefill", "prompts.tokens >= prefill"),
        Bug("one decode has all slots of a prefill", "prompts.requests * decodes < prefill.slots and ", ""),
        Bug("no slot is left for a decode that has nothing", " and prefill.busy + absent_decodes < prefill.slots", ""),
        Bug(
            "a longer prompt than its share waits for ever",
            "            return True\n",
            "            prompts = _PairPrompts(1, prefill.shared_max)\n",
        ),
    ),
    "actors/routing/route.py": (
        Bug(
            "a prompt of a prefill is pending for ever",
            "            self._reservations.discard(*self._pending, self.uncached)\n",
            "",
        ),
    ),
    "actors/routing/routing.py": (
        Bug(
            "only the least busy decode is tried",
            "        if (others := self._find_pair(request, excluded, can_meet_well, has_room, scope)) is not None:\n            return others\n",
            "        return None\n",
        ),
    ),
    "actors/engines/simulated/batch.py": (
        Bug(
            "a simulated prefill waits for a decode that was left",
            "        self._leave(held)\n        self.waiting.pop(",
            "        self.waiting.pop(",
        ),
        Bug(
            "a simulated decode takes what it has no room for",
            "            self.rendezvous_rooms.expect(held.room)\n",
            "            pass\n",
        ),
    ),
    "supervisor/gateway/websocket/message_reader.py": (
        Bug(
            "any number of messages waits to be parsed",
            "if waiting > self.gateway.limits.websocket_queue_max:",
            "if False:",
        ),
        Bug("a short message overtakes those that wait", "passes = not self._waiting or (", "passes = True or ("),
        Bug("a cancel waits behind a long message", "and self.is_urgent(event)", "and False"),
        Bug("the memory of a parsed message is not given back", "                memory.release()\n", ""),
    ),
    "supervisor/gateway/admission.py": (
        Bug(
            "a request for many answers is overtaken for ever",
            "            if waiter.weight <= min(waiter.overtaken_by",
            "            if 0 > min(waiter.overtaken_by",
        ),
        Bug(
            "a request that cannot fit any more blocks the queue",
            "min(waiter.overtaken_by, self.requests_max)",
            "waiter.overtaken_by",
        ),
        Bug(
            "places are kept for a request that has left",
            "                self._admit()  # places may have been kept for it",
            "                pass",
        ),
    ),
    "actors/kit/fair_queue.py": (
        Bug("an owner that is away counts no more", "            self._away += entry.owner in self._accounts\n", ""),
        Bug("an owner that comes back counts twice", "            self._away -= owner in self._accounts\n", ""),
        Bug(
            "an owner that has had its turn keeps its place before equals",
            "turn = next(self._numbers) if amount > 0 else record.turn",
            "turn = record.turn",
        ),
    ),
    "supervisor/cluster/workers.py": (
        Bug(
            "a prefill's bound is one for all",
            "(0, tokens_max) if offer.leg is Leg.PREFILL else (tokens_max, 0)",
            "(tokens_max, 0)",
        ),
        Bug(
            "a prompt that never began is pending at its worker for ever",
            "            pending.discard(request.id)\n            if asker is not None",
            "            if asker is not None",
        ),
    ),
}
