"""Parts of calls in JSON: the name of a tool, its arguments, and an object with both."""

from __future__ import annotations

import json

from actors.text.formats.arguments import decoded, encoded
from actors.text.formats.json_text import SPACE, json_string, json_value
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable

ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "type", "id", *ARGUMENTS})  # of a call; an object with another one is none


def call_object(
    source: Source, tools: ToolTable, *, arguments: tuple[str, ...] = ARGUMENTS, required: bool = False
) -> Reading[tuple[str, str]]:
    """Take a call that is a JSON object, white space before it included, and return its tool and its arguments.

    The arguments are JSON text as the model wrote it, under the first of these keys that is there. Without `required`,
    a call may lack them. Raises `NoCall` at the first character that no call of an offered tool has.
    """
    members = dict[str, str]()
    yield from source.run(SPACE)
    mark = yield from source.expect("{")
    while mark != "}":
        yield from source.run(SPACE)
        key = yield from _key(source)
        members[key] = (yield from _name(source, tools)) if key == "name" else (yield from json_value(source))
        yield from source.run(SPACE)
        mark = yield from source.expect(",", "}")
    given = next((members[key] for key in arguments if key in members), None if required else "null")
    if "name" not in members or given is None:
        raise NoCall
    return members["name"], _object(given)


def _key(source: Source) -> Reading[str]:
    """Take a key of a call and its colon, with the white space around, and return the key."""
    key: str = json.loads((yield from json_string(source)))
    if key not in KEYS:
        raise NoCall
    yield from source.run(SPACE)
    yield from source.expect(":")
    yield from source.run(SPACE)
    return key


def _name(source: Source, tools: ToolTable) -> Reading[str]:
    """Take a JSON string that is the name of a tool, and return the name."""
    yield from source.expect('"')
    written = {json.dumps(name, ensure_ascii=ascii_)[1:]: name for name in tools.schemas for ascii_ in (False, True)}
    return written[(yield from _offered(source, *written))]


def _object(text: str) -> str:
    """Return the JSON object of arguments: models write one as a JSON string, too, and null for none."""
    if text == "null":
        return "{}"
    if text.startswith('"'):
        try:
            value = decoded(json.loads(text))
        except ValueError:
            raise NoCall from None
        text = encoded(value)
    if not text.startswith("{"):
        raise NoCall
    return text


def json_object(source: Source) -> Reading[str]:
    """Take one JSON object, white space before it included, and return its text; raises `NoCall` if it is none."""
    yield from source.run(SPACE)
    if (yield from source.peek()) != "{":
        raise NoCall
    return (yield from json_value(source))


def tool_name(source: Source, tools: ToolTable, *prefixes: str) -> Reading[str]:
    """Take the name of a tool, which may have one of these prefixes, and return it; raises `NoCall`.

    The list of tools decides where a name ends: the longest one with which the text goes on.
    """
    names = {f"{prefix}{name}": name for prefix in (*prefixes, "") for name in tools.schemas}
    return names[(yield from _offered(source, *names))]


def _offered(source: Source, *names: str) -> Reading[str]:
    """Take one of these names, with which an attempt claims to be a call."""
    first = yield from source.peek()
    if first and any(name.startswith(first) for name in names):
        source.claimed = True
    return (yield from source.expect(*names))
