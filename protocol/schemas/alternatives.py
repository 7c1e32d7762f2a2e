"""A conjunction of schemas as alternatives: references followed, `allOf` merged, the branches of unions multiplied out.

A value validates under a conjunction if it validates under every node of one alternative; of a `oneOf`, it must also
validate under no other branch than the alternative's own.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import define, field, frozen

from protocol.schemas.documents import Document, SchemaNode
from protocol.schemas.refusals import pointer_below

Conjunction: TypeAlias = tuple[SchemaNode, ...]
"""Schemas that a value must validate under, all of them."""

ALTERNATIVES_MAX = 4000  # of one conjunction
WORK_MAX = 50_000  # nodes visited for a whole schema


@frozen
class Union:
    """The branches of an `anyOf` or a `oneOf`, or the two cases of a dependency."""

    holder: SchemaNode
    keyword: str
    branches: tuple[Conjunction, ...]


@frozen
class Alternative:
    """Nodes that hold together, and the chosen branch of each `oneOf`."""

    nodes: tuple[SchemaNode, ...]
    taken: tuple[tuple[Union, int], ...]


@frozen
class _Visit:
    """A node to visit, and the nodes that led to it without any step into a value."""

    node: SchemaNode
    via: _Visit | None

    def leads_to(self, pointer: str) -> bool:
        visit: _Visit | None = self
        while visit is not None and visit.node.pointer != pointer:
            visit = visit.via
        return visit is not None


@frozen
class _Partial:
    """An alternative that is being put together."""

    nodes: tuple[SchemaNode, ...]
    unions: tuple[tuple[Union, _Visit], ...]
    taken: tuple[tuple[Union, int], ...]


@define(eq=False)
class Alternatives:
    """The alternatives of a document's conjunctions, each computed once."""

    document: Document
    work: int = 0
    _computed: dict[Conjunction, list[Alternative]] = field(factory=dict)

    def of(self, conjunction: Conjunction) -> list[Alternative]:
        """Return the alternatives of a conjunction, none if no value validates; raises `Unenforceable`."""
        if (kept := self._computed.get(conjunction)) is None:
            kept = self._computed[conjunction] = self._expanded(conjunction)
        return kept

    def _expanded(self, conjunction: Conjunction) -> list[Alternative]:
        waiting = [self._visited(_Partial((), (), ()), [_Visit(node, None) for node in conjunction])]
        done: list[Alternative] = []
        while waiting:
            partial = waiting.pop()
            if partial is None:
                continue
            if not partial.unions:
                done.append(Alternative(partial.nodes, partial.taken))
            else:
                (union, visit), *rest = partial.unions
                for index, branch in reversed(list(enumerate(union.branches))):
                    taken = (*partial.taken, (union, index)) if union.keyword == "oneOf" else partial.taken
                    begun = _Partial(partial.nodes, tuple(rest), taken)
                    waiting.append(self._visited(begun, [_Visit(node, visit) for node in branch]))
            if len(done) + len(waiting) > ALTERNATIVES_MAX:
                holder = conjunction[0]
                holder.refuse(
                    _culprit(holder), f"its unions come to more than {ALTERNATIVES_MAX} combinations; write fewer"
                )
        return done

    def _visited(self, partial: _Partial, visits: list[_Visit]) -> _Partial | None:
        """Add nodes to an alternative, with what they refer to; None if one of them is false."""
        nodes = {node.pointer: node for node in partial.nodes}
        unions = list(partial.unions)
        stack: list[_Visit | SchemaNode] = [*reversed(visits)]
        while stack:
            visit = stack.pop()
            if isinstance(visit, SchemaNode):
                nodes.setdefault(visit.pointer, visit)
                continue
            node = visit.node
            if node.schema is False:
                return None
            if node.schema is True or node.pointer in nodes:
                if visit.via is not None and visit.via.leads_to(node.pointer):
                    node.refuse("$ref", "it refers to itself without a property or an item in between")
                continue
            self.count(node)
            self.document.check(node)
            if visit.via is not None and visit.via.leads_to(node.pointer):
                node.refuse("$ref", "it refers to itself without a property or an item in between")
            before, after = self._together(node)
            stack += [_Visit(other, visit) for other in reversed(after)]
            stack.append(node)
            stack += [_Visit(other, visit) for other in reversed(before)]
            unions += [(union, visit) for union in _unions(node)]
        return _Partial(tuple(nodes.values()), tuple(unions), partial.taken)

    def _together(self, node: SchemaNode) -> tuple[list[SchemaNode], list[SchemaNode]]:
        """Return the nodes that hold together with a node, before its own properties and after them, as written."""
        assert isinstance(node.schema, dict)
        before: list[SchemaNode] = []
        after: list[SchemaNode] = []
        nodes = before
        for keyword in node.schema:
            if keyword == "$ref":
                nodes.append(self.document.target(node))
            elif keyword == "allOf":
                nodes += node.children(keyword)
            elif keyword == "properties":
                nodes = after
        return before, after

    def count(self, node: SchemaNode) -> None:
        """Count one step of work; raises `Unenforceable` beyond the limit."""
        self.work += 1
        if self.work > WORK_MAX:
            node.refuse(_culprit(node), "the schema takes too many steps to follow; write fewer unions and references")


def _culprit(node: SchemaNode) -> str:
    """Return the keyword of a schema that makes the most work."""
    return next((keyword for keyword in ("oneOf", "anyOf", "allOf", "$ref") if node.get(keyword) is not None), "type")


def _unions(node: SchemaNode) -> list[Union]:
    """Return the unions of a node, its dependencies as unions of the two cases included."""
    unions = [
        Union(node, keyword, tuple((branch,) for branch in branches))
        for keyword in ("anyOf", "oneOf")
        if (branches := node.children(keyword))
    ]
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = node.get(keyword)
        for name, needed in value.items() if isinstance(value, dict) else ():
            place = pointer_below(node.pointer, keyword, name)
            absent = SchemaNode(f"{place}?absent", {"properties": {name: False}})
            present = SchemaNode(
                f"{place}?present", {"required": [name, *(needed if isinstance(needed, list) else ())]}
            )
            both = (present,) if isinstance(needed, list) else (present, node.child(keyword, name))
            unions.append(Union(node, keyword, ((absent,), both)))
    return unions
