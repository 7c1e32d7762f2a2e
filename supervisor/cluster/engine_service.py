"""Workers of this node as other nodes ask them.

Another node may be wrong, so what could harm the requests of others is refused here: before it is in an inbox.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from attrs import define, evolve, field

from actors.engines.request_check import check_rank
from protocol.errors import BadRequest
from protocol.messages.generation import REQUEST_ID_LENGTH, Generate
from supervisor.cluster.cluster_worker import AnyReplies, Work
from supervisor.cluster.workers import LocalWorker

REQUEST_ID = re.compile(rf"[0-9a-f]{{{REQUEST_ID_LENGTH}}}")


@define(eq=False)
class EngineService:
    """An engine of this node as one other node asks it: the worker of its first rank, and those of its `others`."""

    worker: LocalWorker
    asker: str | None = None  # the other node
    others: tuple[LocalWorker, ...] = ()  # in the order of their ranks
    _ids: set[str] = field(factory=set)

    def for_node(self, asker: str) -> EngineService:
        """Return the same engine as one other node asks it."""
        return evolve(self, asker=asker)

    @asynccontextmanager
    async def ask(self, request: Work, credit: int) -> AsyncIterator[AnyReplies]:
        """Ask the rank that a request names, as `LocalWorker.ask` does.

        Raises `BadRequest` for a malformed or used id, for too little credit, and for a rank that there is not.
        """
        if REQUEST_ID.fullmatch(request.id) is None:
            raise BadRequest("a request's id is 32 hexadecimal digits")
        if request.id in self._ids:
            raise BadRequest(f"the request {request.id} is being answered already")
        worker = self.worker
        if isinstance(request, Generate):
            if credit < request.sampling.tokens_max:
                raise BadRequest(f"credit for {credit} tokens, where {request.sampling.tokens_max} are asked for")
            check_rank(request, 1 + len(self.others))
            worker = (self.worker, *self.others)[request.rank]
        self._ids.add(request.id)
        try:
            async with worker.ask_for(self.asker, request, credit) as replies:
                yield replies
        finally:
            self._ids.discard(request.id)
