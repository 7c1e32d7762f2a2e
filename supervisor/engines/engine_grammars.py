"""The grammars that engines get for the grammars of clients, decided by a gateway's node.

A grammar that no engine can be held to is refused. Of another one an engine may get a text of its own, which its
grammar backend keeps (`protocol/schemas/`). To decide takes milliseconds, and applications send the same grammar again
and again: decisions are remembered, those that were used last.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from attrs import Factory, define

from actors.grammars import grammar_digest
from actors.kit.offload import Offload, RunInThread
from actors.text.conformance import SchemaValidator, UnusableSchema, check_schema
from protocol.errors import BadRequest
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.grammars import WORDS, find_mistake
from protocol.schemas.enforceable import Unenforceable
from protocol.schemas.grammar import enforceable_grammar

CHARACTER_WORK = 64  # the work for one character of a grammar, in characters to tokenise
REMEMBERED_BYTES_MAX = 8 * 2**20
ENTRY_BYTES = 512  # of a decision beside its text


@define(eq=False)
class EngineGrammars:
    """Decides grammars in threads, and remembers what was decided; refusals are not remembered."""

    run_in_thread: RunInThread
    _decided: OrderedDict[bytes, Grammar] = Factory(OrderedDict)  # by the client's grammar; the last used is last
    _bytes: int = 0

    async def get(self, grammar: Grammar, owner: str) -> Grammar:
        """Return the grammar that an engine gets for an owner's; raises `BadRequest` for a bad or costly one."""
        run = Offload(self.run_in_thread, owner).run
        digest = await run(len(grammar.text), partial(grammar_digest, grammar))
        if (decided := self._decided.get(digest)) is None:
            decided = await run(CHARACTER_WORK * len(grammar.text), partial(engine_grammar, grammar))
        self._remember(digest, decided)
        return decided

    def _remember(self, digest: bytes, decided: Grammar) -> None:
        """Remember a decision as the last used one."""
        self._bytes += 0 if digest in self._decided else _size(decided)
        self._decided[digest] = decided
        self._decided.move_to_end(digest)
        while self._bytes > REMEMBERED_BYTES_MAX:
            self._bytes -= _size(self._decided.popitem(last=False)[1])


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


def _size(grammar: Grammar) -> int:
    return ENTRY_BYTES + len(grammar.text)
