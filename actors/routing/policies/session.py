"""The policy `session`: requests of one session go to one worker, as long as it has room.

A session is a WebSocket lane, a chain of `previous_response_id`, or a client's own name for one within its tenant.
Rendezvous hashing chooses its first worker: several routers choose the same one, also after a restart. A request that
had to go elsewhere takes its session along.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from hashlib import blake2b
from typing import TypeAlias

from attrs import define, field

from actors.routing.candidates import Candidates, Choice
from actors.routing.load import Load
from actors.routing.policies.least_loaded import least_loaded
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate

SESSIONS_MAX = 65_536  # sessions in the table; a forgotten one is placed by its hash again


SessionLeg: TypeAlias = tuple[Leg, str]
"""A session, and one of the legs of its requests."""


@define(eq=False)
class SessionWorkers:
    """The worker that served each session last, of each leg.

    A session belongs to the owner (a client's key) that used it last. When the table is full, the owner with the most
    sessions loses its least recently used one, so no client can push out the sessions of another.
    """

    sessions_max: int = SESSIONS_MAX
    _owners: dict[SessionLeg, str] = field(factory=dict)
    _names: dict[str, OrderedDict[SessionLeg, str]] = field(factory=dict)  # by owner, names of workers

    def get(self, leg: Leg, session: str) -> str | None:
        """Return the name of a session's worker, None if it has none or is forgotten."""
        owner = self._owners.get((leg, session))
        return None if owner is None else self._names[owner][leg, session]

    def set(self, leg: Leg, session: str, name: str, owner: str) -> None:
        """Remember the worker of a session, as the most recently used one of its owner."""
        key = leg, session
        self._forget(key)
        self._owners[key] = owner
        self._names.setdefault(owner, OrderedDict())[key] = name
        if len(self._owners) > self.sessions_max:
            largest = max(self._names.values(), key=len)
            self._forget(next(iter(largest)))

    def _forget(self, key: SessionLeg) -> None:
        if (owner := self._owners.pop(key, None)) is not None:
            names = self._names[owner]
            del names[key]
            if not names:
                del self._names[owner]


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
                return self._choice(request, session, load)
        load = max(candidates, key=lambda load: _weight(session, load.name), default=None)
        return None if load is None else self._choice(request, session, load)

    def _choice(self, request: Generate, session: str, load: Load) -> Choice:
        return Choice(load, on_taken=partial(self.workers.set, load.leg, session, load.name, request.owner))


def _weight(session: str, name: str) -> bytes:
    return blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
