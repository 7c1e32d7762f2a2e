"""The law of schemas: refusals by place and keyword."""

from __future__ import annotations

import json

import pytest

from protocol.schemas.enforceable import Unenforceable, enforceable, enforceable_pattern


def test_a_keyword_that_cannot_be_kept_is_refused_with_its_place() -> None:
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(Unenforceable) as caught:
        enforceable(json.dumps(schema))
    assert (caught.value.pointer, caught.value.keyword) == ("#/properties/a~1b", "uniqueItems")
    assert str(caught.value).startswith("#/properties/a~1b: uniqueItems: ")


def test_a_property_may_be_named_like_a_keyword() -> None:
    schema = json.dumps({"type": "object", "properties": {"not": {"type": "string"}}})
    assert json.loads(enforceable(schema))["properties"] == {"not": {"type": "string"}}


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?!a)b", "(?<=a)b", r"\bword", r"(a)\1", "a^b", "a$b"])
def test_a_construct_that_cannot_be_kept_is_refused_in_a_pattern(pattern: str) -> None:
    with pytest.raises(Unenforceable, match="cannot be enforced"):
        enforceable_pattern(pattern)
    with pytest.raises(Unenforceable, match="#/properties/a: pattern: "):
        enforceable(json.dumps({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}))


@pytest.mark.parametrize("pattern", ["(?:a|b)+", "[$^]", r"\^\$", "^a+$"])
def test_what_can_be_kept_is_left(pattern: str) -> None:
    assert enforceable_pattern(pattern) == pattern
