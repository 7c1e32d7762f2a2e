"""The tools of a request of Responses: functions, namespaces of functions, and the tools of other servers.

A model sees one list of functions: the functions of a namespace have joined names there, `NAMESPACE__NAME`, and short
ones in answers. Tools of other servers, such as a search of the web, are refused by name, or left out where the
operator allows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self, TypeAlias, get_args

import attrs
import msgspec
from attrs import frozen

from protocol.dialects.tools import TOOLS_MAX, ChosenTool, FunctionDefinition, FunctionName, size_mistakes
from protocol.messages.tools import Tool
from protocol.strict.checks import Holds
from protocol.strict.mistakes import Mistake, describe
from protocol.strict.objects import Harmless
from protocol.strict.tagged import tag

SEPARATOR = "__"
ECHOED_BYTES_MAX = 16 * 1024  # of the tools in a response; longer ones lose their descriptions and parameters

OtherToolName: TypeAlias = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "computer",
    "computer_use_preview",
    "local_shell",
    "shell",
    "apply_patch",
    "custom",
    "tool_search",
    "programmatic_tool_calling",
]

OTHER_TOOLS: frozenset[str] = frozenset(get_args(OtherToolName))

_HARMLESS: Harmless = {
    **{key: values for key, values in FunctionDefinition.harmless.items() if key != "type"},
    "async": (False,),
    "allowed_callers": (["direct"],),
    "output_schema": (),
}


@frozen
class FlatFunction(FunctionDefinition):
    """A function of a client, which is a tool by itself."""

    harmless: ClassVar[Harmless] = _HARMLESS

    type: Literal["function"] = attrs.field(kw_only=True, metadata=tag())

    def echo(self, *, short: bool) -> dict[str, object]:
        """Return the function for a response; a short one is a name without description and parameters."""
        parameters = None if short or self.parameters is None else msgspec.Raw(self.parameters.text.encode())
        description = None if short else self.description
        fields = {"name": self.name, "description": description, "parameters": parameters, "strict": bool(self.strict)}
        return {"type": self.type, **fields}


@frozen
class Namespace:
    """Functions of a client under one name."""

    name: FunctionName
    tools: Annotated[tuple[FlatFunction, ...], Holds(1, TOOLS_MAX)]
    description: str | None = None
    type: Literal["namespace"] = attrs.field(kw_only=True, metadata=tag())

    def echo(self, *, short: bool) -> dict[str, object]:
        """Return the namespace for a response."""
        tools = [function.echo(short=short) for function in self.tools]
        description = "" if short else self.description or ""
        return {"type": self.type, "name": self.name, "description": description, "tools": tools}


@frozen
class OtherTool:
    """A tool of another server, which has no effect here: its keys are not read."""

    value_types: ClassVar[tuple[type, ...]] = (dict,)

    type: OtherToolName = attrs.field(metadata=tag(named=False))

    @classmethod
    def from_value(cls, value: Mapping[str, OtherToolName]) -> Self:
        """Return the tool, of which the type is certain already."""
        return cls(value["type"])


AnyTool: TypeAlias = FlatFunction | Namespace | OtherTool


def joined(namespace: str | None, name: str) -> str:
    """Return the name of a function for a model."""
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def functions(tools: Sequence[AnyTool]) -> Iterator[tuple[str, str | None, FlatFunction]]:
    """Yield the path of each function below `tools`, its namespace, and the function."""
    for index, tool in enumerate(tools):
        if isinstance(tool, FlatFunction):
            yield f"[{index}]", None, tool
        elif isinstance(tool, Namespace):
            for inner, function in enumerate(tool.tools):
                yield f"[{index}].tools[{inner}]", tool.name, function


def for_model(tools: Sequence[AnyTool]) -> tuple[Tool, ...]:
    """Return the functions for a processor."""
    return tuple(
        function.tool(f"tools{path}", joined(namespace, function.name))
        for path, namespace, function in functions(tools)
    )


def places(tools: Sequence[AnyTool]) -> dict[str, tuple[str | None, str]]:
    """Return the namespace and the name of each function by its name for the model."""
    return {joined(namespace, each.name): (namespace, each.name) for _, namespace, each in functions(tools)}


def left_out(tools: Sequence[AnyTool]) -> list[str]:
    """Return the types of the tools that a model does not get, each once."""
    return list(dict.fromkeys(tool.type for tool in tools if isinstance(tool, OtherTool)))


def function_mistakes(tools: Sequence[AnyTool]) -> Iterator[Mistake]:
    """Yield a mistake for each function whose name for the model is taken, and for too many or too long functions."""
    seen = set[str]()
    for path, namespace, function in functions(tools):
        name = joined(namespace, function.name)
        if name in seen:
            yield Mistake(f"tools{path}.name", f"is the name of two tools, {describe(name)}")
        seen.add(name)
    if (count := sum(1 for _ in functions(tools))) > TOOLS_MAX:
        yield Mistake("tools", f"must hold at most {TOOLS_MAX} functions, holds {count}")
    yield from size_mistakes(function for _, _, function in functions(tools))


def refused(tools: object, allowed: Collection[str]) -> Iterator[Mistake]:
    """Yield a mistake for each tool of another server in raw JSON that the operator does not have left out."""
    if not isinstance(tools, list):
        return
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind in OTHER_TOOLS and kind not in allowed:
            message = f"{describe(kind)} is not supported here: only functions of the client are, and this is none"
            yield Mistake(f"tools[{index}].type", message, unsupported=True)


def echo(tools: Sequence[AnyTool] | None) -> msgspec.Raw:
    """Return the tools of a response: the tools of its request without the left-out ones."""
    shown = [tool for tool in tools or () if not isinstance(tool, OtherTool)]
    short = sum(each.characters for _, _, each in functions(shown)) > ECHOED_BYTES_MAX
    encoded = msgspec.json.encode([tool.echo(short=short) for tool in shown])
    if not short and len(encoded) > ECHOED_BYTES_MAX:
        encoded = msgspec.json.encode([tool.echo(short=True) for tool in shown])
    return msgspec.Raw(encoded)


def echoed_choice(choice: ChosenTool | None) -> str | dict[str, str]:
    """Return the choice of tools for a response."""
    if choice is None:
        return "auto"
    return choice.mode if choice.name is None else {"type": "function", "name": choice.name}
