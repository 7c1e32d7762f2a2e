"""Bugs to plant in clusters: in links and who dials them, in what nodes know of each other, in greetings."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "supervisor/links/link.py": (
        Bug(
            "a silent peer is never lost",
            "(why := self._liveness.loss_reason(heartbeat, due_at, now, self.ready)) is not None",
            "False",
        ),
        Bug("an idle link sends no heartbeat", "self._writer.send(KeepAlive())", "pass"),
    ),
    "supervisor/links/asking.py": (
        Bug("a deadline is not carried", "body, credit, to, remaining_ms(until))", "body, credit, to, None)"),
        Bug("the deadline of the first token crosses", "_deadline() if rules.first is None else inf", "_deadline()"),
    ),
    "supervisor/links/serving.py": (
        Bug("a deadline is read in seconds", "max(0, frame.within_ms) / 1000", "max(0, frame.within_ms)"),
    ),
    "supervisor/cluster/mesh.py": (
        Bug("two nodes dial each other", "(dials_all or self.name < name)", "True"),
        Bug("nodes that only others name are dialed all at once", "await turn.begin()", "await trio.sleep(0)"),
        Bug(
            "a node that has greeted keeps its turn to be dialed",
            "            turn.end()\n            if peer",
            "            if peer",
        ),
        Bug(
            "an operator may ask engines",
            "for key, service in self.services.items() if not key[0]",
            "for key, service in self.services.items()",
        ),
        Bug(
            "a node that does not answer is dialed as often as one that does",
            "await trio.sleep(backoff.wait_s(failures, self.chance.random()))",
            "await trio.sleep(backoff.wait_s(1, self.chance.random()))",
        ),
    ),
    "supervisor/cluster/carried_links.py": (
        Bug(
            "of two links that were dialed at once each end keeps another",
            "if before is not None and before.dialer != carried.dialer == max(self.name, peer):",
            "if before is not None and before.dialer != carried.dialer == peer:",
        ),
        Bug(
            "the link of a node's earlier life goes on beside the new one", "before.scope.cancel(reason=reason)", "pass"
        ),
        Bug(
            "the end of an older link takes the new one's place away",
            "        if self._carried.get(peer) is carried:\n            del self._carried[peer]\n",
            "        if self._carried.pop(peer, None) is not None:\n",
        ),
        Bug(
            "announcements of an older link are merged",
            "        if self._carried.get(peer) is not carried:\n            return\n",
            "",
        ),
        Bug(
            "a lost link is dialed again only when its calls have been released",
            "nursery.start_soon(self._unlink_when_lost, peer, carried)",
            "pass",
        ),
    ),
    "supervisor/cluster/directory.py": (
        Bug(
            "the end of an older link takes the new one's workers away",
            "if record is not None and record.link is link:",
            "if record is not None:",
        ),
        Bug(
            "queued requests are rerouted before the worker that has come up is known",
            "        self.notify()  # first: what was derived before lacks a worker that has come up\n"
            "        self.reroute_queued()\n",
            "        self.reroute_queued()\n        self.notify()\n",
        ),
        Bug("the workers of a node that drains are not listed as draining", "if record.state.draining)", "if False)"),
        Bug(
            "a node does not announce that it drains",
            "        self.draining = True\n        self.notify()\n",
            "        self.draining = True\n",
        ),
        Bug("a decode counts as the sibling of a prefill", "for leg in worker.leg.substitutes)", "for leg in Leg)"),
    ),
    "supervisor/cluster/node_records.py": (
        Bug(
            "the names of all links are read in one turn",
            "            await trio.lowlevel.checkpoint()  # there",
            "            # there",
        ),
        Bug("a node that is named while others are forgotten is forgotten", "known.unnamed_since = None", "pass"),
        Bug(
            "a rumour replaces the address in the file",
            "if not record.address_is_configured and (from_itself or record.address is None):",
            "if from_itself or not record.address_is_configured or record.link is None:",
        ),
        Bug("a node that drains is still chosen", "link.stalled or self.state.draining)", "link.stalled)"),
        Bug("a node keeps workers that it announces no more", "del self.workers[name]", "pass"),
        Bug(
            "one node may name all nodes that are dialed",
            "            UNCONFIRMED_BY_NODE_MAX - sum(",
            "            10**6 - sum(",
        ),
        Bug("a node that has a link still counts as a rumour", "        self.named_by = None\n", ""),
        Bug("the workers of all nodes together have no limit", "offers=state.offers[:room])", "offers=state.offers)"),
        Bug(
            "a node's own workers leave it no room for them",
            "for record in self if record is not named",
            "for record in self",
        ),
    ),
    "supervisor/cluster/workers.py": (
        Bug(
            "another node's worker stays busy for ever", "            self._count(-1, -tokens)\n", "            pass\n"
        ),
        Bug("a worker's tokens are counted for ever", "self._count(asker, -1, -tokens)", "self._count(asker, -1, 0)"),
        Bug(
            "a worker whose engine is down takes requests that a sibling could",
            "if self.engine.current is None and self.directory.has_sibling(self):",
            "if False:",
        ),
    ),
    "supervisor/cluster/guarded_worker.py": (
        Bug("the id of a request is in use for ever", "self._ids.discard(request.id)", "pass"),
    ),
    "protocol/greeting.py": (
        Bug("a proof is not bound to who proves", "(LABEL, VERSION, prover, dials", "(LABEL, VERSION, dials"),
        Bug("a proof is not bound to the names", "listens.nonce, *names, *lives))", "listens.nonce, *lives))"),
        Bug("a nonce that is sent back is taken", "if other.nonce == self.nonce:", "if False:"),
        Bug("an end that has refused the other goes on reading", "if self._over:", "if False:"),
        Bug("any node may be at the address of another", "if self.expects not in {None, other.node}:", "if False:"),
    ),
    "protocol/attachments.py": (
        Bug("the window for attached bytes is never given back", "self.in_flight_bytes -= size", "pass"),
        Bug(
            "attached bytes of a cancelled request count for ever",
            "            for share in unsent.shares():\n                share.give_back()\n",
            "",
        ),
        Bug(
            "attached bytes of a cancelled request are not acknowledged",
            """        self.unacknowledged_bytes += len(data)
        if self.unacknowledged_bytes > WINDOW_BYTES:""",
            """        self.unacknowledged_bytes += len(data) * (key in self._incomplete)
        if self.unacknowledged_bytes > WINDOW_BYTES:""",
        ),
        Bug("one stream's bytes hold up all others'", "self._turns.move_to_end(key)", "pass"),
    ),
    "protocol/peer.py": (
        Bug(
            "what is attached to a reply of a cancelled request is still sent",
            "            self._outgoing.drop(key)\n            yield frame\n",
            "            yield frame\n",
        ),
        Bug(
            "an end overtakes what is attached before it",
            "if isinstance(frame, Fail) or self",
            "if isinstance(frame, Fail | End) or self",
        ),
    ),
}
