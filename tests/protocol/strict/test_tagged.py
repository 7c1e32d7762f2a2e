"""Objects of several kinds are read by the field that names their kind."""

from __future__ import annotations

from typing import Literal

import attrs
import pytest
from attrs import frozen

from protocol.strict.mistakes import Mistake, Mistakes
from protocol.strict.structure import structure
from protocol.strict.tagged import tag


@frozen
class Circle:
    type: Literal["circle", "disc"] = attrs.field(metadata=tag())
    radius: int


@frozen
class Square:
    type: Literal["square"] = attrs.field(metadata=tag())
    side: int
    colour: str = "red"


@frozen
class Drawing:
    shapes: tuple[Circle | Square, ...]
    first: str | Circle | Square | None = None


def mistakes(data: object) -> tuple[Mistake, ...]:
    with pytest.raises(Mistakes) as raised:
        structure(data, Drawing)
    return raised.value.mistakes


def test_each_object_is_read_as_the_class_that_its_tag_names() -> None:
    shapes = [{"type": "circle", "radius": 1}, {"type": "square", "side": 2}, {"type": "disc", "radius": 3}]
    assert structure({"shapes": shapes}, Drawing) == Drawing(
        (Circle("circle", 1), Square("square", 2), Circle("disc", 3))
    )


def test_a_union_may_have_other_types_beside_tagged_classes() -> None:
    for value, expected in (("x", "x"), (None, None), ({"type": "square", "side": 2}, Square("square", 2))):
        assert structure({"shapes": [], "first": value}, Drawing).first == expected


def test_a_kind_that_no_class_has_is_unsupported_by_its_name_alone() -> None:
    sentence = '"star" is not supported here; only "circle", "disc" or "square" is'
    data = {"shapes": [{"type": "star", "points": 5}]}
    assert mistakes(data) == (Mistake("shapes[0].type", sentence, unsupported=True),)


@pytest.mark.parametrize(
    ("shape", "path", "sentence"),
    [
        ({"radius": 1}, ".type", "is missing"),
        ({"type": None, "radius": 1}, ".type", 'expected "circle", "disc" or "square", got null'),
        ({"type": ["circle"]}, ".type", 'expected "circle", "disc" or "square", got a list'),
        ({"type": "circle", "side": 1}, ".radius", "is missing"),
        ({"type": "square", "side": True}, ".side", "expected an integer, got true"),
        ("circle", "", 'expected an object, got "circle"'),
        ([], "", "expected an object, got a list"),
    ],
)
def test_the_mistakes_in_an_object_are_those_of_its_own_kind(shape: object, path: str, sentence: str) -> None:
    assert mistakes({"shapes": [shape]})[0] == Mistake(f"shapes[0]{path}", sentence)


def test_the_names_of_types_in_a_sentence_do_not_repeat() -> None:
    assert mistakes({"shapes": [], "first": 5}) == (Mistake("first", "expected a string or an object, got 5"),)


@frozen
class Dot:
    type: Literal["dot"] = attrs.field(default="dot", metadata=tag())
    at: int = 0


@frozen
class Ghost:
    type: Literal["ghost"] = attrs.field(metadata=tag(named=False))


@frozen
class Haunted:
    shapes: tuple[Circle | Dot | Ghost, ...]


def test_an_object_without_a_tag_is_of_the_kind_that_needs_none() -> None:
    assert structure({"shapes": [{"at": 3}, {"type": "ghost"}]}, Haunted) == Haunted((Dot(at=3), Ghost("ghost")))


def test_a_kind_that_is_not_named_is_proposed_by_no_error() -> None:
    with pytest.raises(Mistakes, match=r'only "circle", "disc" or "dot" is$'):
        structure({"shapes": [{"type": "square"}]}, Haunted)
