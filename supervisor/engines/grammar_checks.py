"""The check of a request's grammar, by the node of an engine of its model, before the request is routed.

A bad grammar is refused beforehand, with a sentence that the client can act on, and not by an engine in the middle of
other requests. So is a grammar that no engine can be held to. An engine may get another text than the client's, which
says the same in a way that its grammar backend keeps (`protocol/schemas/`). The same grammar goes to the same node,
which keeps its verdict, or to the next one while the first is not available. No engine waits for a check, and no check
may run on the node's event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from zlib import crc32

import trio

from actors.grammars import grammar_digest
from actors.kit.offload import Offload, RunInThread
from actors.text.conformance import SchemaValidator, UnusableSchema, check_schema
from protocol.errors import ActorLost, BadRequest, Draining, EngineLost, LinkLost, NotReady, Overloaded, RequestError
from protocol.messages.cluster import Leg
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.grammars import WORDS, find_mistake
from protocol.messages.kind import Message
from protocol.messages.operations import CheckGrammar, GrammarChecked
from protocol.schemas.enforceable import Unenforceable
from protocol.schemas.grammar import enforceable_grammar
from supervisor.cluster.cluster_worker import ClusterWorker
from supervisor.cluster.directory import Directory

TRY_NEXT = (ActorLost, Draining, EngineLost, LinkLost, NotReady, Overloaded)


async def accept_grammar(_: Message) -> Message:
    """Accept every grammar; for engines whose kind has no checker."""
    await trio.lowlevel.checkpoint()
    return GrammarChecked()


async def check_grammar(
    directory: Directory, run_in_thread: RunInThread, model: str, client_grammar: Grammar, owner: str
) -> Grammar:
    """Return the grammar that an engine gets for a client's, checked by the node of one of the model's engines.

    Raises `BadRequest` for a grammar that is refused. The same grammar goes to the same node as long as that can be
    asked, and else to another one.
    """
    # The cost is counted twice: rules that refer to each other are read more than once.
    grammar = await Offload(run_in_thread, owner).run(
        2 * len(client_grammar.text), partial(engine_grammar, client_grammar)
    )
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


def engine_grammar(grammar: Grammar) -> Grammar:
    """Return the grammar that an engine gets for a client's; raises `BadRequest` for a bad or costly one."""
    if (mistake := find_mistake(grammar)) is not None:
        raise BadRequest(mistake)
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            check_schema(grammar.text)
        enforceable = enforceable_grammar(grammar)
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            SchemaValidator.of(grammar.text)
    except (Unenforceable, UnusableSchema) as error:
        raise BadRequest(f"{WORDS[grammar.kind]} cannot be used: {error}") from None
    if enforceable.text != grammar.text and (mistake := find_mistake(enforceable)) is not None:
        raise BadRequest(mistake)
    return enforceable


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
