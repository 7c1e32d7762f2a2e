"""Checks of the fields of an object against each other, although other fields are wrong."""

from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
from attrs import frozen

from protocol.strict.mistakes import Mistake, Mistakes
from protocol.strict.structure import structure


@frozen(kw_only=True)
class Range:
    low: int
    high: int = 10
    step: int | None = None
    name: str | None = None

    @property
    def width(self) -> int:
        return self.high - self.low

    def checks(self) -> tuple[Callable[[], Iterator[Mistake]], ...]:
        return (self._check_order, self._check_step)

    def _check_order(self) -> Iterator[Mistake]:
        if self.width < 0:
            yield Mistake("low", f"must be at most high ({self.high})")

    def _check_step(self) -> Iterator[Mistake]:
        if self.step is not None and self.step > self.width:
            yield Mistake("step", "is too large")


@frozen
class Ranges:
    all: tuple[Range, ...]
    name: str = ""


def mistakes(data: Any, cls: type[object] = Range) -> list[str]:
    with pytest.raises(Mistakes) as raised:
        structure(data, cls)
    return [str(mistake) for mistake in raised.value.mistakes]


def test_checks_run_beside_mistakes_in_other_fields() -> None:
    assert mistakes({"low": 11, "name": 5, "bogus": 1}) == [
        "name: expected a string, got 5",
        "bogus: is not a key here",
        "low: must be at most high (10)",
    ]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"low": 11, "high": "1"}, 'high: expected an integer, got "1"'),
        ({"low": "11", "step": 20}, 'low: expected an integer, got "11"'),
        ({"high": -1}, "low: is missing"),
    ],
)
def test_a_check_that_reads_a_wrong_field_says_nothing(data: dict[str, Any], sentence: str) -> None:
    assert mistakes(data) == [sentence]


def test_each_object_is_checked_in_its_place() -> None:
    data = {"all": [{"low": 11}, {"low": 0, "step": "1", "high": -1}, {"low": 1, "step": 10}, {"low": 1}], "name": 1}
    assert mistakes(data, Ranges) == [
        "all[0].low: must be at most high (10)",
        'all[1].step: expected an integer, got "1"',
        "all[1].low: must be at most high (-1)",
        "all[2].step: is too large",
        "name: expected a string, got 1",
    ]


def test_a_bug_of_a_check_is_no_mistake_in_the_data() -> None:
    @frozen
    class Broken:
        number: int
        text: str = ""

        def checks(self) -> tuple[Callable[[], Iterator[Mistake]], ...]:
            return (lambda: iter([Mistake("text", self.text.nothing)]),)  # type: ignore[attr-defined]

    with pytest.raises(AttributeError):
        structure({"number": "1"}, Broken)


def test_a_valid_part_is_read_once_more_at_most_however_deep_it_is() -> None:
    reads: list[int] = []

    @frozen
    class Counted:
        value_types = (int,)
        number: int = 0

        @classmethod
        def from_value(cls, value: object) -> Self:
            assert isinstance(value, int)
            reads.append(value)
            return cls(value)

    @frozen
    class Inner:
        number: Counted
        wrong: int = 0

        def checks(self) -> tuple[Callable[[], Iterator[Mistake]], ...]:
            return ()

    @frozen
    class Middle:
        inner: Inner
        number: Counted

        def checks(self) -> tuple[Callable[[], Iterator[Mistake]], ...]:
            return ()

    @frozen
    class Outer:
        middle: Middle
        number: Counted

        def checks(self) -> tuple[Callable[[], Iterator[Mistake]], ...]:
            return ()

    deep = {"middle": {"inner": {"number": 1, "wrong": "x"}, "number": 2}, "number": 3}
    assert mistakes(deep, Outer) == ['middle.inner.wrong: expected an integer, got "x"']
    assert sorted(reads) == [1, 1, 2, 2, 3, 3]
