"""The law of schemas for every kind of grammar: the schemas and regular expressions in it, each decided by itself."""

from __future__ import annotations

import json

from attrs import evolve

from protocol.messages.generation import Grammar, GrammarKind
from protocol.schemas.ebnf_counts import find_count_of_count
from protocol.schemas.enforceable import Unenforceable, enforceable, enforceable_pattern
from protocol.schemas.refusals import pointer_below

SCHEMA_TYPES = frozenset({"json_schema", "qwen_xml_parameter"})
"""The types of formats in a structural tag that have a `json_schema`."""


def enforceable_grammar(grammar: Grammar) -> Grammar:
    """Return the grammar that an engine gets for a client's; raises `Unenforceable` if there is none.

    EBNF grammars are not written anew. A text that is not JSON is left to the compiler, which has a better error.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return evolve(grammar, text=enforceable(grammar.text))
        case GrammarKind.REGEX:
            return evolve(grammar, text=enforceable_pattern(grammar.text))
        case GrammarKind.STRUCTURAL_TAG:
            return evolve(grammar, text=_enforceable_tag(grammar.text))
        case GrammarKind.EBNF:
            _check_counts("#", "ebnf", grammar.text)
            return grammar


def _check_counts(pointer: str, keyword: str, rules: str) -> None:
    """Raise `Unenforceable` for an EBNF grammar with a count that no engine keeps."""
    if (count := find_count_of_count(rules)) is not None:
        reason = f"the count {count} repeats a part that is itself a count; write the inner or the outer one out"
        raise Unenforceable(pointer, keyword, reason)


def _enforceable_tag(text: str) -> str:
    tag = json.loads(text)
    waiting: list[tuple[str, object]] = [("#", tag)]
    while waiting:
        pointer, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(pointer_below(pointer, index), item) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            schemas = _replace_grammars(pointer, value)
            waiting += [(pointer_below(pointer, key), item) for key, item in value.items() if key not in schemas]
    return json.dumps(tag, ensure_ascii=False, separators=(",", ":"))


def _replace_grammars(pointer: str, value: dict[str, object]) -> set[str]:
    """Replace the schemas and regular expressions that an object of a tag has; return their keys."""
    kind = value.get("type")
    if kind == "regex" and isinstance(pattern := value.get("pattern"), str):
        try:
            value["pattern"] = enforceable_pattern(pattern)
        except Unenforceable as error:
            raise Unenforceable(pointer, "pattern", error.reason) from None
        return {"pattern"}
    if kind == "grammar" and isinstance(rules := value.get("grammar"), str):
        _check_counts(pointer, "grammar", rules)
        return {"grammar"}
    if isinstance(kind, str) and kind in SCHEMA_TYPES:
        if value.get("any_order"):
            raise Unenforceable(pointer, "any_order", "what is required cannot be enforced in any order; leave it out")
        return _replace_schema(pointer, value, "json_schema")
    # The older form, whose items have no type.
    return _replace_schema(pointer, value, "schema") if "begin" in value and kind is None else set()


def _replace_schema(pointer: str, value: dict[str, object], key: str) -> set[str]:
    schema = value.get(key)
    if schema is None:
        return {key}
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        value[key] = json.loads(enforceable(text))
    except Unenforceable as error:
        raise Unenforceable(pointer_below(pointer, key) + error.pointer[1:], error.keyword, error.reason) from None
    return {key}
