"""The policy `session`: requests of one session go to one worker, as long as it has room.

A session is a WebSocket lane, a chain of `previous_response_id`, or a client's own name for one. Rendezvous hashing
chooses its first worker: several routers choose the same one, also after a restart. A request that had to go elsewhere
takes its session along.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from hashlib import blake2b

from attrs import define, field

from actors.routing.candidates import Candidates, Choice
from actors.routing.load import Load
from actors.routing.policies.least_loaded import least_loaded
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate

SESSIONS_MAX = 65_536  # sessions in the table; the least recently used beyond it are placed by their hashes again


@define(eq=False)
class SessionWorkers:
    """The worker that served each session last, of each leg."""

    sessions_max: int = SESSIONS_MAX
    _names: OrderedDict[tuple[Leg, str], str] = field(factory=OrderedDict)

    def get(self, leg: Leg, session: str) -> str | None:
        """Return the name of a session's worker, None if it has none or is forgotten."""
        return self._names.get((leg, session))

    def set(self, leg: Leg, session: str, name: str) -> None:
        """Remember the worker of a session."""
        self._names[leg, session] = name
        self._names.move_to_end((leg, session))
        if len(self._names) > self.sessions_max:
            self._names.popitem(last=False)


@define(eq=False)
class BySession:
    """The policy with its table of sessions."""

    workers: SessionWorkers = field(factory=SessionWorkers)

    def __call__(self, request: Generate, candidates: Candidates, /) -> Choice | None:
        """Return the session's worker; without a session, the least loaded."""
        session = "" if request.hints is None else request.hints.session
        if not session:
            return least_loaded(request, candidates)
        for leg in Leg:
            name = self.workers.get(leg, session)
            if name is not None and (load := candidates.find(name)) is not None:
                return self._choice(session, load)
        load = max(candidates, key=lambda load: _weight(session, load.name), default=None)
        return None if load is None else self._choice(session, load)

    def _choice(self, session: str, load: Load) -> Choice:
        return Choice(load, on_taken=partial(self.workers.set, load.leg, session, load.name))


def _weight(session: str, name: str) -> bytes:
    return blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
