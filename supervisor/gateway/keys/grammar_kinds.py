"""The kinds of grammars allowed for the requests of a key: its own, or the ones of `[gateway] grammars`."""

from __future__ import annotations

from functools import partial

import trio

from actors.kit.offload import Offload, RunInThread
from actors.text.call_grammar import demands, holds_calls
from protocol.dialects.request_body import reading_work
from protocol.errors import Forbidden
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.grammars import grammar_kinds
from protocol.messages.text import Respond
from supervisor.gateway.keys.keys import ClientKey

KINDS = frozenset(GrammarKind)


async def check_grammars(request: Respond, key: ClientKey, default: frozenset[str], run_in_thread: RunInThread) -> None:
    """Raise `Forbidden` for a kind of grammar that a request of a key needs, and that the key may not use.

    `default` are the kinds for keys that name none of their own.
    """
    await trio.lowlevel.checkpoint()
    if request.grammar is not None:
        await _check(request.grammar, key, default, run_in_thread, param=request.param("grammar"))
    # Calls are held to the JSON schemas of their tools.
    if holds_calls(request.tools, request.tool_choice):
        param = request.param("tool_choice" if demands(request.tool_choice) else "tools")
        await _check(Grammar(GrammarKind.JSON_SCHEMA, "{}"), key, default, run_in_thread, param=param)


async def _check(
    grammar: Grammar, key: ClientKey, default: frozenset[str], run_in_thread: RunInThread, *, param: str
) -> None:
    """Raise `Forbidden` with the client's field `param` for a kind of grammar that a key may not use."""
    own = key.section.grammars
    allowed = default if own is None else own
    # The text of a structural tag contains grammars of other kinds, and may be long.
    work = reading_work(grammar.text) if grammar.kind is GrammarKind.STRUCTURAL_TAG else 0
    kinds = await Offload(run_in_thread, key.name).run(work, partial(grammar_kinds, grammar))
    if (kind := next((kind for kind in kinds if kind not in allowed), None)) is None:
        return
    names, within = ", ".join(sorted(allowed)) or "none", "" if kind is grammar.kind else f" in a {grammar.kind}"
    who = "requests here" if key.is_anonymous else f"the key {key.name!r}"
    raise Forbidden(f"{who} may not use grammars of the kind {kind}{within}: allowed are {names}", param=param)
