"""A client's schema as a document: its places, and where references lead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Never, TypeAlias
from urllib.parse import unquote

from attrs import define, field, frozen

from protocol.schemas.keywords import DIALECTS, EXPECTED, HARMLESS, MAP_KEYWORDS, REFUSED
from protocol.schemas.refusals import Unenforceable, pointer_below

SchemaValue: TypeAlias = dict[str, object] | bool

LEVELS_MAX = 200
HOPS_MAX = 50  # references to references
_SCHEMA_KEYWORDS = ("additionalProperties", "items", "propertyNames", "not", "if", "then", "else", "contains")
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")


@frozen
class SchemaNode:
    """A schema at its place; two nodes are equal if their places are."""

    pointer: str
    schema: SchemaValue = field(eq=False)

    def refuse(self, keyword: str, reason: str) -> Never:
        """Raise `Unenforceable` for a keyword of this schema."""
        raise Unenforceable(self.pointer, keyword, reason)

    def get(self, keyword: str) -> object:
        """Return the value of a keyword, None if the schema has none."""
        return self.schema.get(keyword) if isinstance(self.schema, dict) else None

    def child(self, *tokens: str | int) -> SchemaNode:
        """Return the schema below this one at a keyword and the names and indices after it."""
        value: object = self.schema
        for token in tokens:
            value = value[token]  # type: ignore[index]
        assert isinstance(value, (bool, dict))
        return SchemaNode(pointer_below(self.pointer, *tokens), value)

    def children(self, keyword: str) -> list[SchemaNode]:
        """Return the schemas of a keyword that has an array of them; none if the keyword is missing."""
        value = self.get(keyword)
        return [self.child(keyword, index) for index in range(len(value))] if isinstance(value, list) else []

    def named(self, keyword: str) -> dict[str, SchemaNode]:
        """Return the schemas of a keyword that has an object of them; none if the keyword is missing."""
        value = self.get(keyword)
        return {name: self.child(keyword, name) for name in value} if isinstance(value, dict) else {}


@define
class Document:
    """The schema of a request."""

    root: SchemaNode
    anchors: dict[str, SchemaNode]
    _checked: set[str] = field(factory=set)

    @classmethod
    def parse(cls, text: str) -> Document:
        """Return the document of a JSON text; raises `Unenforceable` if it is no schema."""
        value = _loaded(text)
        if not isinstance(value, (bool, dict)):
            raise Unenforceable("#", "type", "a schema must be an object, true or false")
        document = cls(SchemaNode("#", value), {})
        dialect = document.root.get("$schema")
        if dialect is not None and (not isinstance(dialect, str) or dialect.rstrip("#") not in DIALECTS):
            document.root.refuse("$schema", f"the dialect {dialect!r} is not known here; write for 2020-12")
        for node in _all_nodes(document.root):
            document._index(node)
        return document

    def _index(self, node: SchemaNode) -> None:
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := node.get(keyword), str):
                self.anchors[name] = node
        if node.pointer != "#" and isinstance(node.get("$id"), str):
            node.refuse("$id", "a schema inside of another can have no identifier of its own; refer to it by a pointer")

    def check(self, node: SchemaNode) -> None:
        """Raise `Unenforceable` if a keyword has a value that it cannot have, or can never be kept."""
        if not isinstance(node.schema, dict) or node.pointer in self._checked:
            return
        self._checked.add(node.pointer)
        for keyword, value in node.schema.items():
            if (expected := EXPECTED.get(keyword)) is not None and not expected[0](value):
                node.refuse(keyword, expected[1])
            if keyword in REFUSED and not (keyword in HARMLESS and HARMLESS[keyword](node.schema)):
                node.refuse(keyword, REFUSED[keyword])

    def target(self, node: SchemaNode) -> SchemaNode:
        """Return the schema that the `$ref` of a node leads to; raises `Unenforceable`."""
        reference = str(node.get("$ref"))
        address, _, fragment = reference.partition("#")
        if address and address != str(self.root.get("$id")).rstrip("#"):
            node.refuse("$ref", f"{reference!r} is outside of the schema; put what it leads to into $defs")
        fragment = unquote(fragment)
        if not fragment:
            return self.root
        if not fragment.startswith("/"):
            if (found := self.anchors.get(fragment)) is None:
                node.refuse("$ref", f"there is no $anchor {fragment!r}")
            return found
        value: object = self.root.schema
        for token in (tokens := [part.replace("~1", "/").replace("~0", "~") for part in fragment[1:].split("/")]):
            if isinstance(value, dict) and token in value:
                value = value[token]
            elif isinstance(value, list) and token.isdecimal() and int(token) < len(value):
                value = value[int(token)]
            else:
                node.refuse("$ref", f"{reference!r} leads nowhere")
        if not isinstance(value, (bool, dict)):
            node.refuse("$ref", f"{reference!r} leads to no schema")
        return SchemaNode(pointer_below("#", *tokens), value)

    def followed(self, node: SchemaNode) -> SchemaNode:
        """Return the schema behind a node that is a reference and nothing else; otherwise the node itself."""
        begin = node
        for _ in range(HOPS_MAX):
            schema = node.schema
            if not isinstance(schema, dict) or any(
                keyword in EXPECTED or keyword in REFUSED for keyword in schema if keyword != "$ref"
            ):
                return node
            self.check(node)
            if "$ref" not in schema:
                return node
            node = self.target(node)
        return begin


def _loaded(text: str) -> object:
    try:
        value: object = json.loads(text, parse_constant=float)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise Unenforceable("#", "type", "the schema is nested too deep; put parts of it into $defs") from None
    except UnicodeEncodeError:
        raise Unenforceable("#", "type", "half of a character (a lone surrogate) is in a string") from None
    except ValueError as error:
        raise Unenforceable("#", "type", f"a schema must be JSON: {error}") from None
    return value


def _all_nodes(root: SchemaNode) -> Iterator[SchemaNode]:
    """Yield every schema in a document, those in no keyword's place left out."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node.schema, dict):
            continue
        yield node
        if node.pointer.count("/") > LEVELS_MAX:
            node.refuse("type", f"the schema is nested more than {LEVELS_MAX} levels deep")
        waiting += [node.child(keyword) for keyword in _SCHEMA_KEYWORDS if isinstance(node.get(keyword), dict)]
        for keyword in (*_LIST_KEYWORDS, *MAP_KEYWORDS):
            value = node.get(keyword)
            entries = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
            waiting += [node.child(keyword, token) for token, entry in entries if isinstance(entry, dict)]
