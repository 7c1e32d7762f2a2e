"""The grammar that an engine gets for a client's, once it is decided that an engine can be held to it."""

from __future__ import annotations

from actors.text.conformance import SchemaValidator, UnusableSchema, check_schema
from protocol.errors import BadRequest
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.grammars import WORDS, find_mistake
from protocol.schemas.enforceable import Unenforceable
from protocol.schemas.grammar import enforceable_grammar


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
