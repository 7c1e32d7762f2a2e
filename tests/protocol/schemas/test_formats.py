"""Every text of a format is valid: for Pydantic, for Python's validator of JSON schemas, and for the judge of answers."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import random
import re
import uuid

import jsonschema_rs
import pytest
from pydantic import AnyUrl, TypeAdapter

from protocol.schemas.expressions import Alternation, Chars, Expression, Repeat, Sequence
from protocol.schemas.formats import FORMATS
from protocol.schemas.patterns import string_expression

TYPES: dict[str, type[object]] = {
    "date": dt.date,
    "time": dt.time,
    "date-time": dt.datetime,
    "duration": dt.timedelta,
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": AnyUrl,
}


def drawn(tree: Expression, rng: random.Random) -> str:
    """Return a text that an expression matches."""
    match tree:
        case Chars(ranges):
            low, high = rng.choice(ranges)
            return chr(rng.choice([low, high, rng.randint(low, high)]))
        case Sequence(parts):
            return "".join(drawn(part, rng) for part in parts)
        case Alternation(parts):
            return drawn(rng.choice(parts), rng)
        case Repeat(part, least, most):
            top = least + 3 if most is None else most
            return "".join(drawn(part, rng) for _ in range(rng.choice([least, top, rng.randint(least, top)])))
        case _:
            raise AssertionError


@pytest.mark.parametrize("name", FORMATS)
def test_every_text_of_a_format_is_valid(name: str) -> None:
    tree, rng = string_expression(FORMATS[name]), random.Random(name)
    judge = jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)
    parse = TypeAdapter(TYPES[name]).validate_json if name in TYPES else None
    for text in {drawn(tree, rng) for _ in range(300)}:
        assert re.fullmatch(FORMATS[name], text)
        assert judge.is_valid(text), text
        if parse is not None:
            parse(json.dumps(text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("date", day) for day in ("1815-12-10", "2000-02-29", "1904-02-29", "0001-01-01", "9999-12-31")),
        *(("uuid", text) for text in ("018f5e9a-7b1c-7000-8000-0123456789AB", "00000000-0000-0000-0000-000000000000")),
        *(("email", text) for text in ("ann@Example.com", "john.montgomerysmith@mail.example.co.uk", "o'brien@a.ie")),
        *(("ipv6", text) for text in ("::1", "2001:db8::1", "fe80::", "1:2:3:4:5:6:7:8", "::")),
        *(("uri", text) for text in ("http://localhost:8080/", "https://127.0.0.1/a?b=c#d", "ftp://example.org/x")),
    ],
)
def test_common_texts_of_a_format_are_possible(name: str, text: str) -> None:
    assert re.fullmatch(FORMATS[name], text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("date", day) for day in ("2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "0000-02-29")),
        ("time", "24:00:00Z"),
    ],
)
def test_what_is_no_day_or_time_is_impossible(name: str, text: str) -> None:
    assert not re.fullmatch(FORMATS[name], text)
