"""The tools of a request, as the parsers of formats read them: the names, and the types of their arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Self, cast

from attrs import Factory, frozen

from protocol.messages.tools import Tool

Schema = Mapping[str, object]
ANY: Schema = {}


@frozen
class ToolTable:
    """The schemas of the arguments of each tool, by its name."""

    schemas: Mapping[str, Schema] = Factory(dict)

    @classmethod
    def of(cls, tools: Sequence[Tool]) -> Self:
        """Return the table of these tools."""
        return cls({tool.name: cast("Schema", json.loads(tool.parameters)) for tool in tools})

    def __contains__(self, name: object) -> bool:
        return name in self.schemas

    def __bool__(self) -> bool:
        return bool(self.schemas)

    def names(self, tool: str) -> Sequence[str]:
        """Return the names of the arguments of a tool."""
        schema = self.schemas.get(tool)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return [*properties] if isinstance(properties, dict) else []

    def property(self, tool: str, name: str) -> Schema:
        """Return the schema of one argument of a tool; that of any value if the tool has none for it."""
        properties = self.schemas.get(tool, ANY).get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        return schema if isinstance(schema, dict) else ANY
