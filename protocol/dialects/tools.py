"""The tools of requests in all dialects: the functions that are offered, the choice among them, and earlier calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal, Self, TypeAlias, cast

import attrs
from attrs import evolve, frozen

from protocol.dialects.formats import JsonObject
from protocol.dialects.message_parts import CACHE_HINTS
from protocol.messages.text import Respond
from protocol.messages.tools import AUTO, NO_PARAMETERS, Tool, ToolCall, ToolChoice, read_arguments
from protocol.strict.checks import Holds, Matches
from protocol.strict.mistakes import Mistake, describe, wrong
from protocol.strict.objects import Harmless
from protocol.strict.tagged import tag

TOOLS_MAX = 512
TOOL_CHARACTERS_MAX = 1024 * 1024  # of all tools of a request: some hundred thousand tokens in each of its prompts
CALL_ID_REQUEST_CHARACTERS = 24  # of the id of a request in those of its calls, which OpenAI bounds at 40 characters
NAME_CHARACTERS_MAX = 128
NAME_PATTERN = f"[A-Za-z0-9_.-]{{1,{NAME_CHARACTERS_MAX}}}"
CALL_ID_CHARACTERS_MAX = 256
ARGUMENTS_CHARACTERS_MAX = 4 * 1024 * 1024  # of one call: as many as an answer may have, and a body
MODES = ("none", "auto", "required")

FunctionName = Annotated[str, Matches(NAME_PATTERN, f"1 to {NAME_CHARACTERS_MAX} of the characters A-Z a-z 0-9 _ . -")]
CallId = Annotated[str, Holds(1, CALL_ID_CHARACTERS_MAX)]


@frozen
class FunctionDefinition:
    """A function of a client: its name, what it does, and a JSON schema of its arguments."""

    harmless: ClassVar[Harmless] = {"type": ("function",), "defer_loading": (False,), **CACHE_HINTS}

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @property
    def characters(self) -> int:
        """The characters of its description and of its parameters."""
        return len(self.description or "") + (0 if self.parameters is None else len(self.parameters.text))

    def tool(self, param: str = "", name: str | None = None) -> Tool:
        """Return the function for a processor; `param` is its place in the request, and `name` another name."""
        parameters = NO_PARAMETERS if self.parameters is None else self.parameters.text
        return Tool(name or self.name, self.description, parameters, bool(self.strict), f"{param}.parameters")


@frozen
class FunctionTool:
    """A function as a tool of chat completions."""

    harmless: ClassVar[Harmless] = CACHE_HINTS

    type: Literal["function"] = attrs.field(metadata=tag())
    function: FunctionDefinition
    strict: bool | None = None  # some clients send it here

    def tool(self, param: str) -> Tool:
        """Return the function for a processor; `param` is the place of the tool in the request."""
        tool = self.function.tool(f"{param}.function")
        return evolve(tool, strict=True) if self.strict and self.function.strict is None else tool


@frozen
class Arguments:
    """The arguments of an earlier call: the JSON text of an object, or nothing at all for no arguments."""

    value_types: ClassVar[tuple[type, ...]] = (str,)

    text: str

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the arguments; raises `Mistakes` for anything but an object as text."""
        text = cast("str", value)
        if not text.strip():
            return cls("{}")
        if len(text) > ARGUMENTS_CHARACTERS_MAX:
            raise wrong(f"must have at most {ARGUMENTS_CHARACTERS_MAX} characters, has {len(text)}")
        try:
            read_arguments(text)
        except (ValueError, RecursionError) as error:
            raise wrong(f"must be the JSON text of an object: {error}") from None
        return cls(text)


@frozen
class CalledFunction:
    """The function of an earlier call, and its arguments."""

    # the arguments once more: openai's client reads those of a stream or of strict tools, and sends them back
    harmless: ClassVar[Harmless] = {"parsed_arguments": (dict,)}

    name: FunctionName
    arguments: Arguments = Arguments("{}")


@frozen
class FunctionCall:
    """A call in an earlier answer of a chat completion."""

    harmless: ClassVar[Harmless] = {"index": (int,), "extra_content": (dict,), **CACHE_HINTS}

    id: CallId
    function: CalledFunction
    type: Literal["function"] = attrs.field(default="function", metadata=tag())

    def call(self) -> ToolCall:
        """Return the call for a processor."""
        return ToolCall(self.id, self.function.name, self.function.arguments.text)


@frozen
class ChosenTool:
    """Whether tools may be called, have to be, or which one; with the name of a function, where one is chosen."""

    value_types: ClassVar[tuple[type, ...]] = (str, dict)

    mode: str
    name: str | None = None

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return a choice by its mode, or of one function by either dialect's form; raises `Mistakes`."""
        if isinstance(value, str):
            if value in MODES:
                return cls(value)
        elif isinstance(value, dict) and value.get("type") == "function":
            function = value.get("function", value)
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or not name:
                raise wrong("has no name of a function")
            return cls("required", name)
        elif isinstance(value, dict) and value.get("type") in MODES and len(value) == 1:
            return cls(str(value["type"]))
        named = ", ".join(map(describe, MODES))
        raise wrong(f"{describe(value)} is not supported here; only {named} or a function is", unsupported=True)

    @property
    def choice(self) -> ToolChoice:
        """The choice for a processor."""
        return ToolChoice(none=self.mode == "none", required=self.mode == "required", name=self.name)


Tools: TypeAlias = Annotated[tuple[FunctionTool, ...], Holds(0, TOOLS_MAX)]


def with_choice(respond: Respond, choice: ChosenTool | None, *, parallel: bool | None) -> Respond:
    """Return a request for a processor with the client's choice among its tools."""
    if choice is None and parallel is not False:
        return respond
    chosen = AUTO if choice is None else choice.choice
    return evolve(respond, tool_choice=chosen, parallel_calls=parallel is not False)


def chat_tools(tools: Sequence[FunctionTool] | None, choice: ChosenTool | None) -> tuple[Tool, ...]:
    """Return the tools of a request with messages for a processor, as many as its model gets to see."""
    return offered([tool.tool(f"tools[{place}]") for place, tool in enumerate(tools or ())], choice)


def offered(tools: Sequence[Tool], choice: ChosenTool | None) -> tuple[Tool, ...]:
    """Return the tools that a model gets to see: none if it may call none."""
    return () if choice is not None and choice.mode == "none" else tuple(tools)


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return the id of a call in an answer, by its choice and its place among the calls of its choice."""
    return f"call_{request_id[:CALL_ID_REQUEST_CHARACTERS]}{choice:02x}{index:04x}"


def tool_mistakes(tools: Sequence[FunctionTool]) -> Iterator[Mistake]:
    """Yield a mistake for each tool of messages with the name of an earlier one, and one for too long tools."""
    seen = set[str]()
    for index, tool in enumerate(tools):
        if (name := tool.function.name) in seen:
            yield Mistake(f"tools[{index}].function.name", f"is the name of two tools, {describe(name)}")
        seen.add(name)
    yield from size_mistakes(tool.function for tool in tools)


def size_mistakes(functions: Iterable[FunctionDefinition]) -> Iterator[Mistake]:
    """Yield the mistake of functions that are too long together, before a template renders them."""
    if (characters := sum(function.characters for function in functions)) > TOOL_CHARACTERS_MAX:
        within = f"must have at most {TOOL_CHARACTERS_MAX} characters of descriptions and parameters in all"
        yield Mistake("tools", f"{within}, have {characters}")


def choice_mistakes(choice: ChosenTool | None, names: Collection[str]) -> Iterator[Mistake]:
    """Yield the mistake of a choice that the tools with these names do not allow."""
    if choice is None or choice.mode != "required":
        return
    if not names:
        yield Mistake("tool_choice", "needs tools")
    elif choice.name is not None and choice.name not in names:
        yield Mistake("tool_choice", f"names {describe(choice.name)}, which is none of the tools")
