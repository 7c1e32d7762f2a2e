"""The tools that a client offers to a model, and the calls of them in a conversation."""

from __future__ import annotations

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
