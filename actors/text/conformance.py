"""The conformance of an answer to the JSON schema of its request, judged once the answer has ended.

An engine is held to a grammar made of the schema. This is the second judgement, by another program and on the client's
own schema: an answer that does not validate (JSON Schema 2020-12) ends in an error. No reference leaves the schema, and
the work on one answer has a limit: rules that refer to each other may otherwise take time exponential in the depth of
an answer. Patterns are matched in linear time. Large ones, which would hold the interpreter for long, are left to the
engine's grammar alone.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import pairwise
from typing import Self, TypeAlias

import jsonschema_rs
import trio
from attrs import define, field

from actors.kit.offload import OFFLOAD_SIZE_MIN, RunWork
from protocol.errors import AnswerInvalid, BadRequest, Overloaded
from protocol.schemas.decimals import without_look_ahead
from protocol.schemas.keywords import MAP_KEYWORDS

VISITS_MAX = 250_000  # of schemas behind references, and of schemas for items: about 0.15 s
PATTERN_BYTES_MAX = 8 * 1024  # of a compiled pattern; a larger one may take a second for a long text
PATTERNS_MAX = 64  # different ones of a schema that are judged
MESSAGE_CHARACTERS_MAX = 200  # of the validator about a schema, which it quotes
RETRY_S = 0.1
DIGITS_MAX = 4_000  # of an integer: clients read no longer ones
VISIT = "espalier-visit"  # the keyword that counts visits; a client's own of this name is replaced
DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})  # their values are no schemas
COUNTED_KEYWORDS = frozenset({"items", "additionalProperties", "propertyNames"})

PATTERN_OPTIONS = jsonschema_rs.RegexOptions(PATTERN_BYTES_MAX)
META_SCHEMA = jsonschema_rs.Draft202012Validator({"$ref": "https://json-schema.org/draft/2020-12/schema"}, offline=True)

Judge: TypeAlias = Callable[[str, str | int | None], Awaitable[None]]
"""Judges a whole answer that ended by itself, or by the client's stop; raises the error in which a bad one ends."""


class UnusableSchema(Exception):
    """The validator cannot read a schema; `str(error)` is a sentence for its author."""


@define(eq=False)
class Conformance:
    """Judges the answers of one request, one after the other."""

    schema: str  # the client's own
    run: RunWork
    param: Callable[[str], str]  # the client's name of a field
    _validator: SchemaValidator | None = None
    _judging: trio.Lock = field(factory=trio.Lock)

    async def judge(self, text: str, matched: str | int | None) -> None:
        """Raise `AnswerInvalid` for an answer that does not conform, `BadRequest` if the client's stop has cut it."""
        async with self._judging:
            size, patterns = len(self.schema) + len(text), '"pattern' in self.schema
            reason = await in_thread(self.run, partial(self._find_fault, text), size, patterns=patterns)
        if reason is None:
            return
        name = self.param("grammar")
        if matched is None:
            raise AnswerInvalid(f"the answer of the model does not keep to {name}: {reason}")
        stop = self.param("stop" if isinstance(matched, str) else "stop_token_ids")
        raise BadRequest(f"{stop} ended the answer before it kept to {name}: {reason}", param=stop)

    def _find_fault(self, text: str) -> str | None:
        self._validator = self._validator or SchemaValidator.of(self.schema)
        return self._validator.find_fault(text)


async def in_thread(run: RunWork, function: Callable[[], str | None], size: int, *, patterns: bool) -> str | None:
    """Run a judgement, however many others wait: the answer is there, and its tokens are counted."""
    # The compiler and the automaton of a pattern hold the interpreter.
    size += OFFLOAD_SIZE_MIN if patterns else 0
    while True:
        try:
            return await run(size, function)
        except Overloaded:
            await trio.sleep(RETRY_S)


@define(eq=False)
class SchemaValidator:
    """A compiled schema; not for several threads at a time."""

    _visits_left: list[int]
    _compiled: jsonschema_rs.Draft202012Validator

    @classmethod
    def of(cls, schema: str) -> Self:
        """Return the validator of a schema; raises `UnusableSchema` for one by which no answer could be judged."""
        left = [VISITS_MAX]

        class Visit:
            """The keyword that counts a visit, and fails when there have been too many."""

            def __init__(self, _: object, __: object, ___: object) -> None: ...

            def validate(self, _: object) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise ValueError

        judged = _Judged().schema(json.loads(schema))
        assert isinstance(judged, dict | bool)
        with _errors_of_schemas():
            compiled = jsonschema_rs.Draft202012Validator(
                judged, validate_formats=True, offline=True, pattern_options=PATTERN_OPTIONS, keywords={VISIT: Visit}
            )
        return cls(left, compiled)

    def find_fault(self, text: str) -> str | None:
        """Return why a text is not a JSON text that validates, None if it is one."""
        self._visits_left[0] = VISITS_MAX
        try:
            valid = self._compiled.is_valid(_strict_json(text))
        except RecursionError:
            return "it is nested too deep"
        except UnicodeEncodeError:
            return "a string in it is not Unicode"
        except json.JSONDecodeError as error:
            return f"it is not JSON ({error.msg})"
        except ValueError as error:
            return str(error)
        if self._visits_left[0] < 0:
            return f"it takes more than {VISITS_MAX:,} steps to validate"
        return None if valid else "it is JSON, but does not validate"


def check_schema(schema: str) -> None:
    """Raise `UnusableSchema` for a text that is no JSON schema."""
    with _errors_of_schemas():
        META_SCHEMA.validate(json.loads(schema))


@contextmanager
def _errors_of_schemas() -> Iterator[None]:
    """Raise `UnusableSchema` for the validator's errors about a schema."""
    try:
        yield
    except jsonschema_rs.ValidationError as error:
        place = "".join(f"/{token}" for token in error.instance_path)
        raise UnusableSchema(f"#{place}: {error.message[:MESSAGE_CHARACTERS_MAX]}") from None
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError) as error:
        raise UnusableSchema(f"#: {str(error)[:MESSAGE_CHARACTERS_MAX]}") from None


def _strict_json(text: str) -> object:
    """Return a JSON text's value; raises `ValueError` for what only some clients read.

    Of a key that stands twice the last one counts, as for parsers: engines cannot be held to keys that differ.
    """
    value: object = json.loads(
        text,
        parse_constant=_refuse_constant,
        parse_float=_fraction,
        parse_int=_integer,
    )
    if "\\u" in text:
        # Raises `UnicodeEncodeError` for half of a surrogate pair.
        json.dumps(value, ensure_ascii=False, default=str).encode()
    return value


@define(eq=False)
class _Judged:
    """Makes the schema by which answers are judged; every schema in it keeps its place, to which others may refer.

    It counts each visit of a schema behind a reference, and of one for items or further keys. Behind a reference the
    count stands first, in an `allOf`, of which the validator reads no more once a part has failed.
    """

    _fits: dict[str, bool] = field(factory=dict)  # whether a pattern is judged

    def schema(self, schema: object) -> object:
        """Return a schema as it is judged."""
        if isinstance(schema, list):
            return [self.schema(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        judged: dict[str, object] = {}
        for keyword, value in schema.items():
            if keyword in DATA_KEYWORDS:
                judged[keyword] = value
            elif keyword == "pattern" and isinstance(value, str):
                # The validator has no look-aheads. Engines are held to the same pattern.
                if self._is_judged(pattern := without_look_ahead(value)):
                    judged[keyword] = pattern
            elif keyword in MAP_KEYWORDS and isinstance(value, dict):
                judged[keyword] = {name: self.schema(each) for name, each in value.items()}
            elif keyword in COUNTED_KEYWORDS and isinstance(below := self.schema(value), dict):
                judged[keyword] = _with_parts(below, {VISIT: True})
            else:
                judged[keyword] = self.schema(value)
        if isinstance(reference := judged.get("$ref"), str):
            _check_reference(reference)
            del judged["$ref"]
            return _with_parts(judged, {VISIT: True}, {"$ref": reference})
        return judged

    def _is_judged(self, pattern: str) -> bool:
        """Return whether a pattern is small enough to be judged."""
        if pattern not in self._fits:
            self._fits[pattern] = len(self._fits) < PATTERNS_MAX and _fits(pattern)
        return self._fits[pattern]


def _fits(pattern: str) -> bool:
    """Return whether the validator compiles a pattern within its size."""
    try:
        jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=PATTERN_OPTIONS)
    except ValueError:
        return False
    return True


def _with_parts(schema: dict[str, object], *parts: object) -> dict[str, object]:
    """Return a schema with further parts at the end of its `allOf`."""
    others = schema.get("allOf")
    return {**schema, "allOf": [*(others if isinstance(others, list) else ()), *parts]}


def _check_reference(reference: str) -> None:
    """Raise `UnusableSchema` for a reference into data, where visits are not counted."""
    tokens = reference.split("/")
    for before, token in pairwise(tokens):
        if token in DATA_KEYWORDS and before not in MAP_KEYWORDS:
            raise UnusableSchema(f"$ref: {reference[:MESSAGE_CHARACTERS_MAX]} is a value, and no schema")


def _fraction(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError("a number in it has too large an exponent") from None


def _integer(digits: str) -> int:
    if len(digits) > DIGITS_MAX:
        raise ValueError(f"a number in it has more than {DIGITS_MAX:,} digits")
    return int(digits)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"it is not JSON ({name} is no number)")
