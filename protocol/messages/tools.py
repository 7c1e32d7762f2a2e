"""The tools that a client offers to a model, and the calls of them in a conversation."""

from __future__ import annotations

import json
from typing import cast

from attrs import field, frozen

NO_PARAMETERS = '{"type":"object","properties":{}}'


@frozen
class Tool:
    """A function that a model may call, and that the client runs."""

    name: str
    description: str | None = None
    parameters: str = NO_PARAMETERS  # the JSON text of a JSON schema of an object
    strict: bool = False  # calls validate against the schema
    param: str = field(default="", eq=False)  # the client's name of the parameters


@frozen
class ToolCall:
    """A call of a tool in an earlier answer."""

    id: str
    name: str
    arguments: str  # the JSON text of an object


@frozen
class ToolChoice:
    """Which tools a model may call, and whether it has to.

    `required` demands at least one call, `name` calls of this tool alone.
    """

    none: bool = False
    required: bool = False
    name: str | None = None


AUTO = ToolChoice()


DIGITS_MAX = 4_000  # of an integer; Python reads no longer ones


def read_arguments(text: str) -> dict[str, object]:
    """Return the arguments of a call as an object; raises `ValueError` or `RecursionError` for any other text.

    Models write what only some readers take: an integer of any length is read as a fraction, and half of a surrogate
    pair as a question mark.
    """
    value: object = json.loads(text, parse_int=_integer)
    if not isinstance(value, dict):
        raise ValueError("it is no object")  # noqa: TRY004  # of a text, whose type is right
    if "\\u" in text:
        whole = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
        value = json.loads(whole, parse_int=_integer)
    return cast("dict[str, object]", value)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= DIGITS_MAX else float(digits)
