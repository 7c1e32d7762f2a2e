"""The grammars that engines get for the grammars of clients, decided by a gateway's node.

A grammar that no engine can be held to is refused. Of another one an engine may get a text of its own, which its
grammar backend keeps (`protocol/schemas/`). To decide takes milliseconds, and applications send the same grammar again
and again: decisions are remembered, those that were used last.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from weakref import WeakValueDictionary

import trio
from attrs import Factory, define

from actors.grammars import grammar_digest
from actors.kit.offload import Offload, RunInThread
from actors.text.engine_grammar import engine_grammar
from protocol.errors import BadRequest
from protocol.messages.generation import Grammar

CHARACTER_WORK = 64  # the work for one character of a grammar, in characters to tokenise
REMEMBERED_BYTES_MAX = 8 * 2**20
ENTRY_BYTES = 512  # of a decision beside its text


@define(eq=False)
class EngineGrammars:
    """Decides grammars in threads, each once at a time, and remembers what was decided."""

    run_in_thread: RunInThread
    # By the client's grammar, the last used one at the end; a text is why it is refused.
    _decided: OrderedDict[bytes, Grammar | str] = Factory(OrderedDict)
    _bytes: int = 0
    _deciding: WeakValueDictionary[bytes, trio.Lock] = Factory(WeakValueDictionary)

    async def get(self, grammar: Grammar, owner: str) -> Grammar:
        """Return the grammar that an engine gets for an owner's; raises `BadRequest` for a bad or costly one.

        Of several askers for one grammar the first decides it, for its owner, and the next one if that leaves.
        """
        run = Offload(self.run_in_thread, owner).run
        digest = await run(len(grammar.text), partial(grammar_digest, grammar))
        if (decided := self._decided.get(digest)) is None:
            lock = self._deciding.setdefault(digest, trio.Lock())
            async with lock:
                if (decided := self._decided.get(digest)) is None:
                    decided = await run(CHARACTER_WORK * len(grammar.text), partial(_decide, grammar))
        self._remember(digest, decided)
        if isinstance(decided, str):
            raise BadRequest(decided)
        return decided

    def _remember(self, digest: bytes, decided: Grammar | str) -> None:
        """Remember a decision as the last used one."""
        self._bytes += 0 if digest in self._decided else _size(decided)
        self._decided[digest] = decided
        self._decided.move_to_end(digest)
        while self._bytes > REMEMBERED_BYTES_MAX:
            self._bytes -= _size(self._decided.popitem(last=False)[1])


def _decide(grammar: Grammar) -> Grammar | str:
    try:
        return engine_grammar(grammar)
    except BadRequest as error:
        return error.detail


def _size(decided: Grammar | str) -> int:
    return ENTRY_BYTES + len(decided if isinstance(decided, str) else decided.text)
