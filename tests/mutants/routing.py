"""Bugs to plant where requests are routed, resumed and drained."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/routing/routed_request.py": (
        Bug(
            "a request leaves both workers if one is overcommitted",
            "        return self._failover.crashed_names\n",
            "        return {*self.route.names, *self._failover.crashed_names}\n",
        ),
        Bug(
            "a prefill is not left when its decode fails",
            "            await replies.relay(note)\n",
            "            with trio.CancelScope(shield=True):\n                await replies.relay(note)\n",
        ),
        Bug(
            "a prefill is not left when its decode has ended",
            'legs.cancel_scope.cancel(reason="the decode has ended")',
            "pass",
        ),
        Bug(
            "equal prompts meet in one room",
            "        room = self.routing.new_room()\n",
            "        room = sum(self.request.tokens)\n",
        ),
        Bug(
            "a resume forgets the last token that was sent",
            "tokens=[*self.request.tokens, *sent],",
            "tokens=[*self.request.tokens, *sent[:-1]],",
        ),
        Bug(
            "a resume asks for all tokens again",
            "tokens_max=sampling.tokens_max - len(sent),",
            "tokens_max=sampling.tokens_max,",
        ),
        Bug("a resume does not say what was said", "said=self.request.said + len(sent),", "said=self.request.said,"),
        Bug("a resume goes by the id of the first try", "id=self.routing.new_id())", "id=self.request.id)"),
        Bug(
            "a worker's count of its tokens is believed",
            "return self._finished(finished.reason, finished.matched)",
            "return finished",
        ),
        Bug(
            "a worker's count of cached tokens is believed",
            "min(started.cached_tokens, ",
            "max(started.cached_tokens, ",
        ),
        Bug(
            "a resumed answer says what its second prefill had cached",
            "if self._first_route is None or self._first_route is route:",
            "if True:",
        ),
        Bug(
            "a place is kept for each request that failed",
            "        finally:\n            route.end()\n",
            "        finally:\n            pass\n",
        ),
        Bug(
            "an answer whose end was lost is asked for once more",
            "if (ended := self._complete()) is not None:",
            "if (ended := None) is not None:",
        ),
    ),
    "actors/routing/failover.py": (
        Bug(
            "what cannot be resumed exactly is resumed",
            "if sent and not resumes_exactly(remaining.sampling):",
            "if False:",
        ),
        Bug("a request is never lost too often", "if self._losses > limits.resumes_max or", "if False or"),
        Bug("a request kills one engine after the other", "self._crashes += 1", "pass"),
        Bug(
            "the worker that was lost is asked again at once", "self.lost_names.add(worker.full_name)\n        if", "if"
        ),
        Bug("the loss of a link fails the request", "HandOffFailed, LinkLost, NotReady", "HandOffFailed, NotReady"),
    ),
    "actors/routing/reservations.py": (
        Bug("places that are kept are not counted", "= load.busy + requests, load", "= load.busy, load"),
    ),
    "actors/routing/routing.py": (
        Bug(
            "a choice in vain counts as one",
            "        if route is not None:\n            self.observer.chosen",
            "        if True:\n            self.observer.chosen",
        ),
        Bug(
            "a request moves to a worker that is as full",
            "self._select_of(request, excluded, BeginsNow(request), scope)",
            "self._select_of(request, excluded, has_room, scope)",
        ),
        Bug(
            "a request waits at a full worker beside an idle one",
            "for room in (begins, has_room):",
            "for room in (has_room,):",
        ),
        Bug(
            "a prompt of any length goes to two legs",
            "or len(request.tokens) < self.prefill_tokens_min",
            "or len(request.tokens) < 0",
        ),
    ),
    "actors/kit/priority_inbox.py": (
        Bug(
            "who is turned away makes room for others",
            "            self._take(entry).answer.fail(error)\n",
            "            self._take(entry).answer.fail(error)\n            break\n",
        ),
        Bug(
            "whoever stops waiting for room stays in line",
            "                self._remove(entry, group)\n",
            "                pass\n",
        ),
        Bug(
            "whoever waits for room is never let in",
            "        entry.item.call.on_left = None\n        self._let_in()\n",
            "        entry.item.call.on_left = None\n",
            harmless="a receiver takes those who wait for room, too, and the next to come lets them in",
        ),
    ),
    "supervisor/node/node.py": (
        Bug(
            "other nodes do not hear of a drain",
            "self.assembly.directory.drain()  # from now on",
            "pass  # from now on",
        ),
        Bug("a drain waits for no worker", "await assembly.directory.wait_idle()", "pass"),
        Bug("a drain begins before others have heard of it", "await trio.sleep(assembly.links.section.tell_s)", "pass"),
        Bug(
            "a drain waits for its streams for ever",
            "with grace.wait_at_most(self.drain_s):",
            "with grace.wait_at_most(1e9):",
        ),
        Bug("a node leaves without a word", 'assembly.links.send_bye(f"node', 'str(f"node'),
    ),
    "supervisor/control/control.py": (
        Bug(
            "an operator drains the node that was asked",
            'if request.node not in {"", self.directory.name}:',
            "if False:",
        ),
    ),
    "actors/routing/load.py": (
        Bug(
            "a router that has a queue keeps all slots from another",
            "no_slot = self.busy >= self.slots and not self.may_wait",
            "no_slot = self.busy >= self.slots",
        ),
    ),
    "actors/routing/rebalancing.py": (
        Bug(
            "one that finds no memory keeps smaller ones from moving",
            "while by_size and await",
            "while False and await",
        ),
        Bug(
            "a round tries any number in vain",
            "while by_size and await self._find_room(by_size[0], routing):",
            "while by_size and (await self._find_room(by_size[0], routing) or True):",
        ),
        Bug("a request that may go nowhere keeps others from moving", "frozenset(request.avoided)", "frozenset[str]()"),
        Bug("two routers give way to each other at once", "2**request.moves * (1 + load.place)", "2**request.moves"),
        Bug(
            "a request of a pair gives way to nobody",
            "if waits_since is not None and _gives_way(",
            "if waits_since is None and _gives_way(",
        ),
    ),
    "actors/routing/waiting.py": (
        Bug("all that wait look at each change", "if line[0] is not own:", "if False:"),
        Bug(
            "those behind the first wait another turn",
            "        last = served\n",
            "        last = served\n        break\n",
        ),
        Bug(
            "those behind the first go on in any order",
            "            last.following = served\n",
            "            served.woken.set()\n",
        ),
        Bug(
            "one that leaves takes the turn of others",
            "                line[0].woken.set()\n",
            "                pass\n",
        ),
        Bug("one that leaves with a route keeps it", "                own.route.end()\n", "                pass\n"),
        Bug("a line is kept for ever", "                del self._lines[key]\n", "                pass\n"),
    ),
    "actors/routing/candidates.py": (
        Bug("a choice looks at all workers without memory", "len(leading) >= LEADING_MAX or ", ""),
        Bug(
            "of ranked workers the first without memory ends the search",
            "if self.ranked and not begins(load):",
            "if self.ranked:",
        ),
        Bug("what is reserved takes no room", "            if not has_room(reserved):\n", "            if False:\n"),
    ),
    "actors/routing/round_robin.py": (
        Bug(
            "a choice that comes to nothing takes a turn",
            "return Choice(load, on_taken=partial(self._take, load))",
            "self._take(load)\n        return Choice(load, on_taken=partial(self._take, load))",
        ),
    ),
}
