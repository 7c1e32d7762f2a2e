"""Schemas as applications write them, drawn: most keywords, beside each other, and small enough for a tiny model to end."""

from __future__ import annotations

from typing import TypeAlias

from hypothesis import strategies as st

Schema: TypeAlias = dict[str, object]

NAMES = ("a", "b", "name")
PATTERNS = (
    *("^[a-z]{1,4}$", "^[A-Z]{2}[0-9]{3}$", "[0-9]{2}", "^a|b$", r"^\d+$", r"^\w{2,3}$", "^(x|yz){1,3}$", "^a", "z$"),
    *("^(?=.*[A-Z])[a-zA-Z]{4}$", "^(?!a)[a-z]{2}$", r"\bword\b", "a^b"),
)
FORMATS = ("date", "date-time", "time", "uuid", "ipv4", "email", "uri", "duration", "hostname")


@st.composite
def _some(draw: st.DrawFn, /, **fields: st.SearchStrategy[object]) -> Schema:
    """Draw some of the fields, each with its value."""
    names = draw(st.sets(st.sampled_from(sorted(fields))))
    return {name: draw(fields[name]) for name in sorted(names)}


def _with(schema: Schema, more: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return more.map(lambda drawn: {**schema, **drawn})


def _strings() -> st.SearchStrategy[Schema]:
    short: Schema = {"type": "string", "maxLength": 6}
    return st.one_of(
        st.just(short),
        _with(short, _some(minLength=st.integers(0, 6))),
        st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.sampled_from(PATTERNS).map(lambda pattern: {**short, "pattern": pattern}),
        st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name}),
    )


def _numbers() -> st.SearchStrategy[Schema]:
    bounds = _some(
        minimum=st.integers(-20, 20), exclusiveMaximum=st.integers(21, 99), multipleOf=st.sampled_from((1, 5, 0.5))
    )
    lower: Schema = {"maximum": 99, "minimum": -99}
    return st.one_of(_with({"type": "integer", **lower}, bounds), _with({"type": "number", "maximum": 99}, bounds))


def _values() -> st.SearchStrategy[Schema]:
    values = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.sampled_from(NAMES), st.just([1]), st.just({}))
    return st.one_of(
        values.map(lambda value: {"const": value}),
        st.lists(values, min_size=1, max_size=4).map(lambda each: {"enum": each}),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(lambda each: {"type": "string", "enum": each}),
        st.sampled_from(
            ({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"], "maximum": 9, "minimum": 0})
        ),
    )


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    sizes = _some(minItems=st.integers(0, 2), uniqueItems=st.booleans())
    return st.one_of(
        inner.flatmap(lambda items: _with({"type": "array", "items": items, "maxItems": 3}, sizes)),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        ),
        st.just({"type": "array", "minItems": 1, "maxItems": 2}),
    )


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    counts = _some(
        required=st.lists(st.sampled_from(NAMES), unique=True, max_size=3),
        minProperties=st.integers(0, 2),
        additionalProperties=st.one_of(st.booleans(), inner),
    )
    named = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3)
    closed: Schema = {"type": "object", "additionalProperties": False}
    return st.one_of(
        named.map(lambda each: {**closed, "properties": each, "required": sorted(each)}),
        named.flatmap(lambda each: _with({"type": "object", "properties": each, "maxProperties": 3}, counts)),
        inner.map(lambda each: {"type": "object", "additionalProperties": each, "maxProperties": 2}),
        st.just({"type": "object", "required": ["a", "b"], "maxProperties": 2}),
    )


def _unions(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    branches = st.lists(inner, min_size=1, max_size=3)
    beside = st.one_of(st.just(Schema()), st.just({"description": "x"}), inner)
    either = st.tuples(st.sampled_from(("anyOf", "oneOf", "allOf")), branches, beside)
    return st.one_of(
        either.map(lambda drawn: {**drawn[2], drawn[0]: drawn[1]}),
        st.tuples(inner, beside).map(lambda drawn: {**drawn[1], "$ref": "#/$defs/d", "$defs": {"d": drawn[0]}}),
        inner.map(lambda each: {"type": "string", "maxLength": 4, "not": each}),
    )


def schemas() -> st.SearchStrategy[Schema]:
    """Return the strategy of schemas; a reference is at the root, where its definitions are."""
    leaves = st.one_of(_strings(), _numbers(), _values())
    inner = st.recursive(leaves, lambda below: st.one_of(_arrays(below), _objects(below)), max_leaves=4)
    return st.one_of(_objects(inner), _objects(inner), _arrays(inner), _unions(inner), inner)
