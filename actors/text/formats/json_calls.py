"""Parts of calls in JSON: the name of a tool, its arguments, and an object with both."""

from __future__ import annotations

import json
from collections.abc import Mapping

from actors.text.formats.json_text import SPACE, json_value
from actors.text.formats.source import NoCall, Reading, Source
from actors.text.formats.tool_table import ToolTable

# Numbers remain text: those with very many digits cannot be converted, and others would not be the same again.
DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


def call_of(
    text: str, tools: ToolTable, *, arguments: tuple[str, ...] = ("arguments",), required: bool = False
) -> tuple[str, str]:
    """Return the tool and the arguments of a call, which is a JSON object with these keys for the arguments.

    The arguments are JSON text as the model wrote it. Without `required`, a call without arguments has none.
    Raises `NoCall` if it is a call of no tool that was offered.
    """
    members = members_of(text)
    tool = json.loads(members.get("name", "null"))
    given = next((members[key] for key in arguments if key in members), None if required else "{}")
    if not isinstance(tool, str) or tool not in tools or given is None or not given.startswith("{"):
        raise NoCall
    return tool, given


def members_of(text: str) -> Mapping[str, str]:
    """Return the JSON texts of the members of an object; of the last ones with a key; raises `NoCall` for a list."""
    place = _behind_space(text, 0)
    if text[place] != "{":
        raise NoCall
    members = dict[str, str]()
    place = _behind_space(text, place + 1)
    while text[place] != "}":
        key, place = DECODER.raw_decode(text, place)
        begin = _behind_space(text, _behind_space(text, place) + 1)
        _, place = DECODER.raw_decode(text, begin)
        members[str(key)] = text[begin:place]
        place = _behind_space(text, place)
        if text[place] == ",":
            place = _behind_space(text, place + 1)
    return members


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
    return names[(yield from source.expect(*names))]


def _behind_space(text: str, place: int) -> int:
    while text[place] in SPACE:
        place += 1
    return place
