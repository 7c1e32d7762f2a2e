"""The check of a request's grammar, by the node of an engine of its model, before the request is routed.

A bad grammar is refused beforehand, with a sentence that the client can act on, and not by an engine in the middle of
other requests. The gateway's node decides it first, and may send another text than the client's. The same grammar goes
to the same node, which keeps its verdict, or to the next one while the first is not available. No engine waits for a
check, and no check may run on the node's event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from zlib import crc32

import trio

from actors.grammars import grammar_digest
from protocol.errors import ActorLost, BadRequest, Draining, EngineLost, LinkLost, NotReady, Overloaded, RequestError
from protocol.messages.cluster import Leg
from protocol.messages.generation import Grammar
from protocol.messages.kind import Message
from protocol.messages.operations import CheckGrammar, GrammarChecked
from supervisor.cluster.cluster_worker import ClusterWorker
from supervisor.cluster.directory import Directory
from supervisor.engines.engine_grammars import EngineGrammars

TRY_NEXT = (ActorLost, Draining, EngineLost, LinkLost, NotReady, Overloaded)


async def accept_grammar(_: Message) -> Message:
    """Accept every grammar; for engines whose kind has no checker."""
    await trio.lowlevel.checkpoint()
    return GrammarChecked()


async def check_grammar(
    directory: Directory,
    engine_grammars: EngineGrammars,
    model: str,
    client_grammar: Grammar,
    owner: str,
    /,
    *,
    decided: bool = False,
) -> Grammar:
    """Return the grammar that an engine gets for a client's, checked by the node of one of the model's engines.

    Raises `BadRequest` for a grammar that is refused. The same grammar goes to the same node as long as that can be
    asked, and else to another one. With `decided` the grammar is the engine's already.
    """
    grammar = client_grammar if decided else await engine_grammars.get(client_grammar, owner)
    failure: RequestError = NotReady("no engine of this model is up")
    for worker in _workers_from(directory, model, grammar_digest(grammar)):
        try:
            verdict = await worker.call(CheckGrammar(grammar, owner))
        except TRY_NEXT as error:
            failure = error
            continue
        assert isinstance(verdict, GrammarChecked)
        if verdict.refusal:
            raise BadRequest(verdict.refusal)
        return grammar
    raise failure


def _workers_from(directory: Directory, model: str, digest: bytes) -> Iterator[ClusterWorker]:
    """Yield a model's available workers, beginning at the digest's index among all of them."""
    workers = directory.derived(("by name", model), partial(_by_name, directory, model))
    begin = crc32(digest) % max(1, len(workers))
    for worker in chain(islice(workers, begin, None), islice(workers, begin)):
        if worker.is_up:
            yield worker


def _by_name(directory: Directory, model: str) -> list[ClusterWorker]:
    workers = (worker for worker in directory.all_workers() if worker.model == model and worker.leg is not Leg.ENCODE)
    return sorted(workers, key=lambda worker: worker.full_name)
