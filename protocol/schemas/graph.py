"""The shapes of a schema as a graph: from every conjunction of schemas to those of its properties and items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Never

from attrs import define, evolve, field

from protocol.schemas.alternatives import Alternative, Alternatives, Conjunction, Union
from protocol.schemas.documents import Document, SchemaNode
from protocol.schemas.exclusion import Exclusion
from protocol.schemas.keywords import EXPECTED, MAP_KEYWORDS
from protocol.schemas.narrowing import Narrowing
from protocol.schemas.shapes import Array, Map, Object, Shape, Values
from protocol.schemas.values import Evaluator

CONJUNCTIONS_MAX = 5000


@define(eq=False)
class Graph:
    """The shapes of every conjunction that a document's root leads to."""

    document: Document
    shapes: dict[Conjunction, list[Shape]] = field(factory=dict)
    _busy: set[Conjunction] = field(factory=set)
    _alternatives: Alternatives = field(init=False)
    _narrowing: Narrowing = field(init=False)
    _exclusion: Exclusion = field(init=False)
    _computed: dict[Conjunction, list[Shape]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        evaluator = Evaluator(self.document)
        self._alternatives = Alternatives(self.document)
        self._narrowing = Narrowing(self._alternatives, evaluator)
        self._exclusion = Exclusion(self._alternatives, evaluator, self._shapes_of)

    def fill(self) -> None:
        """Compute all shapes, and leave out the impossible ones; raises `Unenforceable`."""
        root: Conjunction = (self.document.root,)
        waiting = [root]
        while waiting:
            conjunction = waiting.pop()
            if conjunction in self.shapes:
                continue
            shapes = self._shapes_of(conjunction)
            assert shapes is not None
            self.shapes[conjunction] = shapes
            if len(self.shapes) > CONJUNCTIONS_MAX:
                self.document.root.refuse(
                    "allOf", f"more than {CONJUNCTIONS_MAX} different schemas come of it; write fewer"
                )
            waiting += [child for shape in shapes for child in children(shape)]
        self._prune()

    def _shapes_of(self, conjunction: Conjunction) -> list[Shape] | None:
        if conjunction in self._busy:
            return None
        if (kept := self._computed.get(conjunction)) is None:
            self._busy.add(conjunction)
            try:
                found = _with_one_list(
                    [shape for one in self._alternatives.of(conjunction) for shape in self._exclusive(one)]
                )
            finally:
                self._busy.discard(conjunction)
            kept = self._computed[conjunction] = [self._followed(shape) for shape in dict.fromkeys(found)]
        return kept

    def _exclusive(self, alternative: Alternative) -> list[Shape]:
        """Return the shapes of an alternative, held apart from the other branches of each `oneOf`."""
        shapes = self._narrowing.shapes(alternative.nodes)
        for union, taken in alternative.taken:
            shapes = [_discriminated(shape, union) for shape in shapes]
            for index, branch in enumerate(union.branches):
                if index == taken:
                    continue
                kept: list[Shape] = []
                for shape in shapes:
                    if (own := self._exclusion.apart(shape, branch)) is not None:
                        kept.append(own)
                    elif not isinstance(shape, Values):
                        first, second = sorted((taken, index))
                        reason = (
                            f"a value may validate under both of the branches {first} and {second}; write anyOf, or"
                        )
                        union.holder.refuse("oneOf", f"{reason} give each a required property with a const of its own")
                shapes = kept
        return shapes

    def _followed(self, shape: Shape) -> Shape:
        """Return a shape whose parts are named by the schemas behind mere references, so that equal parts are one."""

        def followed(conjunction: Conjunction) -> Conjunction:
            return tuple(dict.fromkeys(map(self.document.followed, conjunction)))

        match shape:
            case Object(properties):
                return evolve(shape, properties=tuple((name, followed(child)) for name, child in properties))
            case Map(_, values):
                return evolve(shape, values=followed(values))
            case Array(prefix, items):
                rest = None if items is None else followed(items)
                return evolve(shape, prefix=tuple(map(followed, prefix)), items=rest)
            case _:
                return shape

    def _prune(self) -> None:
        """Leave out what no finite value can have: shapes, optional properties, items."""
        possible: set[Conjunction] = set()
        before = -1
        while before < len(possible):
            before = len(possible)
            for conjunction in reversed(self.shapes):
                if conjunction not in possible and any(_is_possible(one, possible) for one in self.shapes[conjunction]):
                    possible.add(conjunction)
        if (root := (self.document.root,)) not in possible:
            self._refuse_impossible(root, possible)
        for conjunction, shapes in self.shapes.items():
            kept = [_pruned(shape, possible) for shape in shapes if _is_possible(shape, possible)]
            self.shapes[conjunction] = list(dict.fromkeys(kept))

    def _refuse_impossible(self, conjunction: Conjunction, possible: set[Conjunction]) -> Never:
        """Raise `Unenforceable` for the schema that makes the root impossible, as deep as it can be found."""
        passed = {conjunction}
        while shapes := self.shapes[conjunction]:
            below = (child for child in children(shapes[0]) if child not in possible and child not in passed)
            if (child := next(below, None)) is None:
                break
            passed.add(child)
            conjunction = child
        node = conjunction[-1] if conjunction else self.document.root
        node.refuse(culprit(node), "no value can validate under it and under what is beside it")


def _with_one_list(shapes: list[Shape]) -> list[Shape]:
    """Return shapes with all listed values in the first list."""
    lists = [shape for shape in shapes if isinstance(shape, Values)]
    if len(lists) < 2:
        return shapes
    listed = Values(tuple(dict.fromkeys(text for shape in lists for text in shape.texts)))
    index = shapes.index(lists[0])
    others = (shape for shape in shapes[index:] if not isinstance(shape, Values))
    return [*shapes[:index], listed, *others]


def _discriminated(shape: Shape, union: Union) -> Shape:
    """Return an object that has the property by which programs tell the branches apart (OpenAPI's `discriminator`)."""
    discriminator = union.holder.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(shape, Object) and isinstance(name, str) and name in dict(shape.properties):
        return evolve(shape, required=shape.required | {name})
    return shape


def children(shape: Shape) -> Iterator[Conjunction]:
    """Yield the conjunctions of the properties, values or items of a shape."""
    match shape:
        case Object(properties):
            yield from (child for _, child in properties)
        case Map(_, values):
            yield values
        case Array(prefix, items):
            yield from prefix
            if items is not None:
                yield items
        case _:
            return


def _is_possible(shape: Shape, possible: set[Conjunction]) -> bool:
    match shape:
        case Object(properties, required, least, most):
            able = {name for name, child in properties if child in possible}
            return required <= able and least <= len(able) and (most is None or most >= max(least, len(required)))
        case Map(_, values, least, most):
            return (least == 0 or values in possible) and (most is None or most >= least)
        case Array(prefix, items, least):
            needed = [*prefix[:least], *([items] if least > len(prefix) else [])]
            return all(child in possible for child in needed)
        case _:
            return True


def _pruned(shape: Shape, possible: set[Conjunction]) -> Shape:
    match shape:
        case Object(properties):
            return evolve(shape, properties=tuple(pair for pair in properties if pair[1] in possible))
        case Map(_, values, _, most) if values not in possible or most == 0:
            return Object((), frozenset())
        case Array(prefix, items, least, most):
            length = next((index for index, child in enumerate(prefix) if child not in possible), len(prefix))
            length = length if most is None else min(length, most)
            open_ended = length == len(prefix) and items in possible and (most is None or most > length)
            return Array(prefix[:length], items if open_ended else None, least, most if open_ended else length)
        case _:
            return shape


def culprit(root: SchemaNode) -> str:
    """Return the first keyword of a schema that constrains values, its type only if there is no other."""
    if isinstance(root.schema, bool):
        return "false"
    names = (keyword for keyword in root.schema if keyword in EXPECTED and keyword not in {"type", *MAP_KEYWORDS[:2]})
    return next(names, "type")
