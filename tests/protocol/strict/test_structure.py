import math
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

import attrs
import pytest
from attrs import Factory, frozen

from protocol.strict.checks import Holds, Within
from protocol.strict.hooks import ITEMS_MAX, MISTAKES_MAX
from protocol.strict.mistakes import Mistake, Mistakes, wrong
from protocol.strict.structure import structure
from protocol.strict.tagged import tag


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@frozen
class Gateway:
    port: Annotated[int, Within(at_least=1, at_most=65535)]
    host: str = "127.0.0.1"
    tls: bool = False
    drain_s: float = 5.0


@frozen
class Pool:
    size: int
    kind: Literal["decode", "prefill"] = "decode"


@frozen
class Cluster:
    gateway: Gateway
    pools: dict[str, Pool] = Factory(dict)
    colours: tuple[Colour, ...] = ()
    names: list[str] = Factory(list)
    model: str | None = None
    stop: str | tuple[str, ...] = ()
    tls: Literal["auto"] | Gateway | None = None


def mistakes(data: list[Any] | Mapping[Any, Any] | Mapping[Any, object], cls: type[object] = Cluster) -> list[Any]:
    with pytest.raises(Mistakes) as raised:
        structure(data, cls)
    return [(each.path, each.message) for each in raised.value.mistakes]


def only(path: str, message: str, data: list[Any] | Mapping[Any, Any], cls: type[object] = Cluster) -> None:
    assert mistakes(data, cls) == [(path, message)]


def test_valid_data_become_frozen_classes() -> None:
    text = """
        colours = ["red", "blue"]
        names = ["a"]
        stop = "x"
        tls = { port = 1 }
        [gateway]
        port = 8000
        drain_s = 3
        [pools.main]
        size = 2
        kind = "prefill"
    """
    assert structure(tomllib.loads(text), Cluster) == Cluster(
        gateway=Gateway(8000, drain_s=3.0),
        pools={"main": Pool(2, "prefill")},
        colours=(Colour.RED, Colour.BLUE),
        names=["a"],
        stop="x",
        tls=Gateway(1),
    )
    cluster = structure({"gateway": {"port": 1, "drain_s": 3}, "tls": "auto", "model": None, "stop": ["a"]}, Cluster)
    assert isinstance(cluster.gateway.drain_s, float)
    assert (cluster.tls, cluster.model, cluster.stop) == ("auto", None, ("a",))


def test_all_mistakes_are_reported_at_once() -> None:
    data = {
        "gateway": {"prot": 1, "port": "8000", "tls": "false", "drain_s": True},
        "pools": {"a": {"size": 1.0}, "b.c": {"kind": "dekode", "size": True}},
        "colours": ["red", "green", 3],
        "stop": 5,
    }
    assert mistakes(data) == [
        ("gateway.port", 'expected an integer, got "8000"'),
        ("gateway.tls", 'expected true or false, got "false"'),
        ("gateway.drain_s", "expected a number, got true"),
        ("gateway.prot", "is not a key here; did you mean port?"),
        ("pools.a.size", "expected an integer, got 1.0"),
        ('pools["b.c"].size', "expected an integer, got true"),
        ('pools["b.c"].kind', 'expected "decode" or "prefill", got "dekode"'),
        ("colours[1]", 'expected "red" or "blue", got "green"'),
        ("colours[2]", 'expected "red" or "blue", got 3'),
        ("stop", "expected a string or a list, got 5"),
    ]


def test_missing_values_and_values_of_another_shape_are_mistakes() -> None:
    only("gateway", "is missing", {})
    only("gateway.port", "is missing", {"gateway": {}})
    only("", "expected an object, got a list", [])
    only("gateway", "expected an object, got null", {"gateway": None})
    fine = {"gateway": {"port": 1}}
    only("colours", 'expected a list, got "red"', fine | {"colours": "red"})
    only("names", "expected a list, got an object", fine | {"names": {}})
    only("pools", "expected an object, got a list", fine | {"pools": []})
    only("model", "expected a string, got false", fine | {"model": False})
    only("tls", 'expected "auto" or an object, got 1', fine | {"tls": 1})
    only("tls", 'expected "auto", got "off"', fine | {"tls": "off"})
    only("tls.port", "must be at least 1 and at most 65535, got 0", fine | {"tls": {"port": 0}})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_are_finite(value: float) -> None:
    only("gateway.drain_s", f"expected a finite number, got {value}", {"gateway": {"port": 1, "drain_s": value}})


def test_numbers_that_are_too_large_are_mistakes() -> None:
    only("gateway.drain_s", "is too large", {"gateway": {"port": 1, "drain_s": 10**400}})
    only("gateway.port", "must be at least 1 and at most 65535, got a huge integer", {"gateway": {"port": 10**5000}})


def test_an_integer_in_a_union_with_a_number_stays_an_integer() -> None:
    @frozen
    class Either:
        value: int | float | None

    assert repr(structure({"value": 3}, Either).value) == "3"
    assert repr(structure({"value": 3.0}, Either).value) == "3.0"
    only("value", "expected an integer or a number, got true", {"value": True}, Either)


def test_errors_of_a_class_itself_become_mistakes() -> None:
    @frozen
    class Range:
        low: int
        high: int

        def __attrs_post_init__(self) -> None:
            if self.low > self.high:
                raise Mistakes((Mistake("low", f"must be at most high ({self.high})"),))
            if self.low < 0:
                raise ValueError("is no range")

    @frozen
    class Holder:
        range: Range

    only("range.low", "must be at most high (1)", {"range": {"low": 2, "high": 1}}, Holder)
    only("range", "is no range", {"range": {"low": -1, "high": 1}}, Holder)


def test_harmless_keys_are_ignored_and_other_kinds_of_a_tag_unsupported() -> None:
    @frozen
    class Wish:
        harmless: ClassVar = {"n": (1,), "tools": ([],), "text": ({"a": {"b": 1}},), "user": (str, dict), "never": ()}
        type: Literal["text"] = attrs.field(metadata=tag())
        value: int = 0

    fine = {"type": "text", "n": 1, "tools": [], "text": {"a": {"b": 1, "c": None}}, "user": "x", "never": None}
    assert structure(fine, Wish) == Wish("text")
    with pytest.raises(Mistakes) as raised:
        structure(fine | {"n": True, "tools": [1], "text": {"a": {"b": 2}}, "user": 5, "value": "x"}, Wish)
    assert raised.value.mistakes == (
        Mistake("n", "true is not supported here; only 1 is", unsupported=True),
        Mistake("tools", "a list is not supported here; leave it out", unsupported=True),
        Mistake("text", "an object is not supported here; leave it out", unsupported=True),
        Mistake("user", "expected a string or an object, got 5"),
        Mistake("value", 'expected an integer, got "x"'),
    )
    with pytest.raises(Mistakes) as raised:
        structure({"type": "image", "url": 1, "tools": [1]}, Wish)
    assert raised.value.mistakes == (
        Mistake("type", '"image" is not supported here; only "text" is', unsupported=True),
    )
    only("type", 'expected "text", got 5', {"type": 5}, Wish)


def test_the_number_of_reported_mistakes_is_limited() -> None:
    assert len(mistakes({"gateway": {"port": 1}, "names": [0] * 1000})) == MISTAKES_MAX
    assert len(mistakes({"gateway": {"port": 1}, "pools": {str(key): 0 for key in range(1000)}})) == MISTAKES_MAX
    found = mistakes({"gateway": {"port": 1}} | {f"x{key:04}": 0 for key in range(1000)})
    assert len(found) == MISTAKES_MAX + 1
    assert found[-1] == ("", f"has {1000 - MISTAKES_MAX} more keys that are not known here")
    items, keys = (f"holds {ITEMS_MAX + 1} {what}; at most {ITEMS_MAX} are read" for what in ("items", "keys"))
    many = {f"x{key}": 0 for key in range(ITEMS_MAX)}
    only("names", items, {"gateway": {"port": 1}, "names": ["x"] * (ITEMS_MAX + 1)})
    only("", keys, {"gateway": {"port": 1}} | many)
    only("pools", keys, {"gateway": {"port": 1}, "pools": many | {"y": 0}})
    only("gateway", keys, {"gateway": {"port": 1} | many})
    only(f'["{"k" * 39}…"]', "is not a key here", {"gateway": {"port": 1}, "k" * 100_000: 1})


def test_lengths_are_limited() -> None:
    @frozen
    class Sized:
        text: Annotated[str, Holds(2, 3)] = "xx"
        items: Annotated[tuple[int, ...], Holds(1, 2)] = (1,)

    only("text", "must hold at least 2 characters", {"text": "x"}, Sized)
    only("text", "must hold at most 3 characters, holds 4", {"text": "xxxx"}, Sized)
    only("items", "must not be empty", {"items": []}, Sized)
    only("items", "must hold at most 2 items, holds 3", {"items": [1, 2, 3]}, Sized)


def test_the_items_of_a_list_or_an_object_that_is_too_long_are_not_read() -> None:
    @frozen
    class Counted:
        value_types: ClassVar[tuple[type, ...]] = (int,)
        read: ClassVar[int] = 0

        @classmethod
        def from_value(cls, _: object) -> Self:
            cls.read += 1
            return cls()

    @frozen
    class Sized:
        items: str | Annotated[tuple[Counted, ...], Holds(1, 2)] | None = None
        by_name: Annotated[dict[str, Counted], Holds(0, 2)] | None = None

    only("items", "must hold at most 2 items, holds 3", {"items": [1, 2, 3]}, Sized)
    only("by_name", "must hold at most 2 items, holds 3", {"by_name": {"a": 1, "b": 2, "c": 3}}, Sized)
    assert Counted.read == 0
    only("items", "expected a string or a list, got an object", {"items": {"a": 1, "b": 2, "c": 3}}, Sized)
    structure({"items": [1, 2], "by_name": {"a": 1}}, Sized)
    assert Counted.read == 3


def test_a_class_may_read_its_values_itself() -> None:
    @frozen
    class Even:
        value_types: ClassVar[tuple[type, ...]] = (int, str)

        value: int

        @classmethod
        def from_value(cls, value: Any) -> Self:
            if int(value) % 2:
                raise wrong("is odd", "[here]")
            return cls(int(value))

    @frozen
    class Pair:
        one: Even
        other: tuple[Even, ...] | Even | None = None

    assert structure({"one": 2, "other": ["4", 6]}, Pair) == Pair(Even(2), (Even(4), Even(6)))
    assert structure({"one": "2", "other": 8}, Pair) == Pair(Even(2), Even(8))
    only("one", "expected an integer or a string, got true", {"one": True}, Pair)
    only("one", "is missing", {}, Pair)
    only("other", "expected a list or an integer or a string, got an object", {"one": 2, "other": {}}, Pair)
    only("other[1][here]", "is odd", {"one": 2, "other": [2, 3]}, Pair)


@frozen
class Chosen:
    number: Literal[1, "one"]
    colour: Colour = Colour.RED


@pytest.mark.parametrize("value", [True, 1.0, 2, "1", "two", None, [1], {"one": 1}])
def test_a_choice_is_one_of_its_values_by_type_too(value: object) -> None:
    [(path, message)] = mistakes({"number": value}, Chosen)
    assert (path, message.partition(", got ")[0]) == ("number", 'expected 1 or "one"')
    [(path, _)] = mistakes({"number": 1, "colour": value}, Chosen)
    assert path == "colour"
