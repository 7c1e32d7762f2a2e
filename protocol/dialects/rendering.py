"""The fields of requests about how a chat template renders a conversation: its variables, its effort, its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Protocol, Self, TypeAlias

import msgspec
from attrs import frozen

from protocol.dialects.formats import JsonObject
from protocol.messages.text import DEFAULT_RENDERING, Rendering, Role
from protocol.messages.tools import Tool
from protocol.strict.mistakes import Mistake, wrong

ONE_END = "an answer goes on with a message, or begins a new one"

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@frozen
class ChatTemplateKwargs:
    """Variables of a chat template, an extension of SGLang's and vLLM's servers; the template decides about them."""

    value_types: ClassVar[tuple[type, ...]] = (dict,)

    values: dict[str, object]

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return variables by name; raises `Mistakes` if they are too large or too deep."""
        JsonObject.from_value(value)
        try:
            msgspec.msgpack.encode(value)  # as a message is encoded, which has no larger numbers
        except OverflowError:
            raise wrong("has an integer of more than 64 bits") from None
        assert isinstance(value, dict)
        return cls(value)


class RenderingFields(Protocol):
    """A request with a conversation."""

    @property
    def chat_template_kwargs(self) -> ChatTemplateKwargs | None:
        """The variables of the template."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the prompt ends with the beginning of the answer, by default unless it continues a message."""

    @property
    def continue_final_message(self) -> bool | None:
        """Whether the answer goes on with the last message."""


def rendering(
    request: RenderingFields,
    effort: str | None,
    effort_field: str,
    *,
    prefix: bool | None = False,
    tools: tuple[Tool, ...] = (),
) -> Rendering:
    """Return the choices of a client; `effort_field` is its name of the field that has `effort`.

    `prefix`: the answer goes on with the last message by a key of that message. The template shows the `tools`.
    """
    variables = {} if request.chat_template_kwargs is None else request.chat_template_kwargs.values
    continues = bool(request.continue_final_message or prefix)
    begins_answer = not continues and request.add_generation_prompt is not False
    if not variables and effort is None and begins_answer and not tools:
        return DEFAULT_RENDERING
    return Rendering(variables, effort, effort_field, continues, begins_answer, tools)


def ending_mistakes(request: RenderingFields) -> Iterator[Mistake]:
    """Yield the contradiction between the two fields about the end of a prompt."""
    if request.continue_final_message and request.add_generation_prompt:
        yield Mistake("continue_final_message", f"cannot stand beside add_generation_prompt: {ONE_END}")


def continuation_mistakes(request: RenderingFields, last: Role) -> Iterator[Mistake]:
    """Yield the mistake of a request to go on with a last message that has another role than the assistant's."""
    if request.continue_final_message and last is not Role.ASSISTANT:
        yield Mistake("continue_final_message", f"needs the last message to be the assistant's, not one of {last}")
