"""Where a model's grammars are checked: by the node of an engine of it, ahead of the request that carries them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import TypeAlias
from zlib import crc32

import trio

from actors.grammars import grammar_digest
from actors.kit.calls import Address, Call
from actors.kit.offload import Offload, RunInThread
from protocol.errors import (
    ActorLost,
    BadRequest,
    Draining,
    EngineLost,
    LinkLost,
    NotReady,
    Overloaded,
    RequestError,
)
from protocol.grammars import complaint
from protocol.kind import Message
from protocol.messages import CheckGrammar, Grammar, GrammarChecked
from supervisor.cluster.directory import Directory
from supervisor.cluster.workers import LocalWorker, RemoteWorker
from supervisor.links.serving import Services

log = logging.getLogger(__name__)

Asked: TypeAlias = Call[CheckGrammar, GrammarChecked, GrammarChecked]
Checking: TypeAlias = Address[CheckGrammar, GrammarChecked, GrammarChecked]

ELSEWHERE = (ActorLost, Draining, EngineLost, LinkLost, NotReady, Overloaded)


async def accept(_: Message) -> Message:
    """Accept every grammar: of an engine whose backend bounds each token itself, or has none."""
    await trio.lowlevel.checkpoint()
    return GrammarChecked()


# For a model ---------------------------------------------------------------------------


async def check(
    directory: Directory, own: Services, aside: RunInThread, model: str, grammar: Grammar, owner: str
) -> None:
    """Have a grammar checked by an engine's node; raises `BadRequest` if it is refused.

    The same grammar goes to the same node as long as that can be asked, and else to another one.
    """
    # Rules that refer to each other are read more than once.
    said = await Offload(aside, owner).run(2 * len(grammar.text), partial(complaint, grammar))
    if said is not None:
        raise BadRequest(said)
    failure: RequestError = NotReady("no engine of this model is up")
    for worker in _in_turn(directory, model, grammar_digest(grammar)):
        try:
            found = await _ask(worker, own, CheckGrammar(grammar, owner))
        except ELSEWHERE as error:
            failure = error
            continue
        if found.refusal:
            raise BadRequest(found.refusal)
        return
    raise failure


def _in_turn(directory: Directory, model: str, digest: bytes) -> Iterator[LocalWorker | RemoteWorker]:
    """Yield a model's workers that are up, each digest's from a place of its own on, whoever is up."""
    known = directory.derived(("by name", model), partial(_by_name, directory, model))
    begin = crc32(digest) % max(1, len(known))
    for worker in chain(islice(known, begin, None), islice(known, begin)):
        if worker.offer.up:
            yield worker


def _by_name(directory: Directory, model: str) -> list[LocalWorker | RemoteWorker]:
    return sorted((each for each in directory.all_workers() if each.model == model), key=lambda each: each.load.name)


async def _ask(worker: LocalWorker | RemoteWorker, own: Services, request: CheckGrammar) -> GrammarChecked:
    if isinstance(worker, LocalWorker):
        asking = own[worker.name, CheckGrammar].ask(request, 0)
    elif worker.link is None:
        raise LinkLost(f"there is no link to node {worker.node}")
    else:
        asking = worker.link.ask(request, 0, worker.offer.name)
    async with asking as answer:
        found = await answer.result()
    assert isinstance(found, GrammarChecked)
    return found
