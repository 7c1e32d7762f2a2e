"""What crosses a wire or reaches a client is the same before and after files move and names change.

`pins.json` has the bytes of every frame, of every message between nodes and of every message of a greeting, and digests of
the OpenAPI document with and without its descriptions. The examples are made from the types of the fields, so that no
name stands here that a rename could change along with the wire. To renew the pins, on purpose:
`python -m tests.protocol.test_pins`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
import msgspec
import pytest

from protocol.errors import ERRORS_BY_CODE
from protocol.link import codec, frames, greeting
from protocol.openapi.document import document
from protocol.tensors import MemoryRange, SharedRegion
from supervisor.gateway.http.routes import ROUTES

PINS = Path(__file__).with_name("pins.json")
SETS: dict[str, Any] = {"frames": frames, "messages": codec, "greeting": greeting}
CONSTRAINED = {  # by the names of fields, as the wire has them: what their classes check
    ("version", int): frames.VERSION,
    ("nonce", bytes): b"n" * 32,
    ("mac", bytes): b"m" * 32,
    ("packed", bytes): b"ids1ids2",
    ("code", str): "secret",
    ("shape", tuple[int, ...]): (2, 0),
}
SENTENCES = {"description", "summary"}  # the keys of what people read and programs do not
TRACE = {"id": "1" * 32, "span": "2" * 16, "parent": "3" * 16, "state": "a=b"}
SCALARS: dict[type, Callable[[Iterator[int]], object]] = {
    object: lambda numbers: f"value-{next(numbers)}",  # any JSON
    int: next,
    float: lambda numbers: next(numbers) + 0.5,
    str: lambda numbers: f"s{next(numbers)}",
    bytes: lambda numbers: b"b%d" % next(numbers),
    memoryview: lambda numbers: memoryview(b""),
}


def example(hint: Any, numbers: Iterator[int], *, full: bool) -> Any:
    """Return a value of a type; numbers count up, so that a swap of two fields of the same type is detected."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {Union, UnionType}:
        return example(arguments[0], numbers, full=full)
    if origin is not None:
        return container(origin, arguments, numbers, full=full)
    if attrs.has(hint):
        return instance(hint, numbers, full=full)
    if hint is bool:
        return full
    return list(hint)[-1] if issubclass(hint, StrEnum) else SCALARS[hint](numbers)


def container(origin: Any, arguments: tuple[Any, ...], numbers: Iterator[int], *, full: bool) -> Any:
    """Return a dictionary with one entry, or an array with two: for an enumeration, with all of its values."""
    if origin is dict or (origin is tuple and arguments[1:] != (...,)):
        values = [example(each, numbers, full=full) for each in arguments]
        return dict([values]) if origin is dict else tuple(values)
    if isinstance(arguments[0], type) and issubclass(arguments[0], StrEnum):
        return origin(arguments[0])
    origin = list if origin is Sequence else origin
    return origin(example(arguments[0], numbers, full=full) for _ in range(2 if full else 0))


def instance(cls: Any, numbers: Iterator[int], *, full: bool) -> Any:
    """Return a message with all of its fields given, or with its defaults wherever it has any."""
    hints = get_type_hints(cls)
    if hints.keys() >= TRACE.keys():
        return cls(**TRACE)
    fields = {field.name: hints[field.name] for field in attrs.fields(cls) if full or field.default is attrs.NOTHING}
    fixed = {name: CONSTRAINED[name, hint] for name, hint in fields.items() if (name, hint) in CONSTRAINED}
    if cls in {MemoryRange, SharedRegion}:
        fixed["size"] = 0  # as the tensors that it belongs to, of the shape above
    return cls(
        **{name: fixed[name] if name in fixed else example(hint, numbers, full=full) for name, hint in fields.items()}
    )


def examples(kinds: Mapping[int, type]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield every kind's number with two messages of it."""
    for number, cls in sorted(kinds.items()):
        yield number, [instance(cls, count(1), full=full) for full in (False, True)]


def enumerations(cls: Any, found: set[tuple[StrEnum, ...]]) -> None:
    """Collect the values of every enumeration that a message may hold, however deep."""
    hints = [cls] if isinstance(cls, type) and get_origin(cls) is None else get_args(cls)
    for hint in hints:
        if not isinstance(hint, type) or get_origin(hint) is not None:
            enumerations(hint, found)
        elif attrs.has(hint):
            for each in get_type_hints(hint).values():
                enumerations(each, found)
        elif issubclass(hint, StrEnum):
            found.add(tuple(hint))


def encoded_examples(module: ModuleType) -> dict[Any, Any]:
    return {str(number): [module.encode(each).hex() for each in both] for number, both in examples(module.KINDS)}


def greeted() -> list[Any]:
    """Return what two nodes say in a greeting, in the order in which they say it."""
    dials = greeting.Greeter("dials", "c", "a", b"s" * 32, b"1" * 32)
    listens = greeting.Greeter("listens", "c", "b", b"s" * 32, b"2" * 32)
    hello, answer = dials.start(), listens.start()
    assert listens.receive(hello[0]) == []
    proof = dials.receive(answer[0])
    return [each.hex() for each in [*hello, *answer, *proof, *listens.receive(proof[0])]]


def errors() -> dict[Any, Any]:
    return {
        code: [cls.fault, cls.http_status, cls.close_code, cls.retry_after_s] for code, cls in ERRORS_BY_CODE.items()
    }


def values() -> list[Any]:
    found: set[tuple[StrEnum, ...]] = set()
    for module in SETS.values():
        for cls in module.KINDS.values():
            enumerations(cls, found)
    return sorted(map(list, found))


def digest(value: object) -> str:
    return sha256(msgspec.json.encode(value)).hexdigest()


def served(*, keys_wanted: bool) -> dict[str, Any]:
    return document("0", ROUTES.operations, models=("tiny", "large"), keys_wanted=keys_wanted)


def shape(value: Any) -> Any:
    """Return a document without its sentences."""
    if isinstance(value, Mapping):
        return {key: shape(each) for key, each in value.items() if not (key in SENTENCES and isinstance(each, str))}
    return [shape(each) for each in value] if isinstance(value, list | tuple) else value


def current() -> dict[Any, Any]:
    documents = [served(keys_wanted=wanted) for wanted in (False, True)]
    return {
        **{name: encoded_examples(module) for name, module in SETS.items()},
        "greeted": greeted(),
        "values": values(),
        "errors": errors(),
        "openapi": digest(documents),
        "openapi_shape": digest(shape(msgspec.to_builtins(documents))),
    }


RENEW = "if that is on purpose: python -m tests.protocol.test_pins"
PINNED = json.loads(PINS.read_text()) if PINS.exists() else {}


@pytest.mark.parametrize("name", SETS)
def test_every_message_is_encoded_as_pinned(name: str) -> None:
    now, pinned = encoded_examples(SETS[name]), PINNED[name]
    new, gone = now.keys() - pinned.keys(), pinned.keys() - now.keys()
    assert not gone, f"{name} {sorted(gone)} are gone, which nodes of older versions still send; {RENEW}"
    changed = [number for number in now if number in pinned and now[number] != pinned[number]]
    assert not changed, (
        f"{name} {changed} have other bytes. Older nodes read past a new field with a default; any other change first "
        f"needs a higher VERSION of protocol/link/frames.py; {RENEW}"
    )
    assert not new, f"{name} {sorted(new)} have no pins (older nodes do not know them: CONTRIBUTING.md); {RENEW}"


@pytest.mark.parametrize("name", ["messages", "greeting"])
def test_every_pinned_message_is_decoded(name: str) -> None:
    module = SETS[name]
    decode = partial(codec.decode, shared=True, remote=True) if module is codec else module.decode
    for number, both in examples(module.KINDS):
        assert str(number) in PINNED[name], f"{type(both[0]).__name__}, number {number}, has no pin; {RENEW}"
        assert [decode(bytes.fromhex(each)) for each in PINNED[name][str(number)]] == both


def test_every_pinned_frame_is_decoded() -> None:
    for number, both in examples(frames.KINDS):
        data = bytes.fromhex("".join(PINNED["frames"][str(number)]))
        assert list(frames.FrameReader().feed(data)) == both


def test_a_greeting_has_the_pinned_bytes() -> None:
    assert greeted() == PINNED["greeted"]


def test_enumerations_and_error_codes_have_the_pinned_values() -> None:
    assert values() == PINNED["values"], f"the values of an enumeration have changed; {RENEW}"
    assert errors() == PINNED["errors"], f"an error has changed; {RENEW}"


def test_the_openapi_document_and_its_shape_are_as_pinned() -> None:
    now = current()
    assert now["openapi_shape"] == PINNED["openapi_shape"], f"the OpenAPI document has changed; {RENEW}"
    assert now["openapi"] == PINNED["openapi"], f"sentences of the OpenAPI document have changed; {RENEW}"


if __name__ == "__main__":
    PINS.write_text(json.dumps(current(), indent=1) + "\n")
