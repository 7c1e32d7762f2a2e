"""A call as a JSON object with the name of a tool and its arguments."""

from __future__ import annotations

import json

from actors.text.formats.source import NoCall
from actors.text.formats.tool_table import ToolTable


def call_of(text: str, tools: ToolTable, name: str = "name", arguments: str = "arguments") -> tuple[str, str]:
    """Return the tool and the JSON text of the arguments of a call; these are the keys of both.

    Raises `NoCall` if it is a call of no tool that was offered.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise NoCall
    tool, given = value.get(name), value.get(arguments, {})
    if not isinstance(tool, str) or tool not in tools or not isinstance(given, dict):
        raise NoCall
    return tool, json.dumps(given, ensure_ascii=False)
