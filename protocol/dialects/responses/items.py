"""The items of a request's `input`: messages, the parts of which their content may consist, reasoning and calls.

Images are `input_image` parts. OpenAI has no part for videos; `input_video`, with `video_url`, is the one that clients
of other servers of this API send. Other parts, audio and files, are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

import attrs
from attrs import evolve, frozen

from protocol.dialects.media_parts import (
    DetailName,
    MediaPart,
    MediaUrl,
    content_of,
    image,
    misplaced,
    video,
)
from protocol.dialects.message_parts import CACHE_HINTS, RefusalPart, misplaced_refusals
from protocol.dialects.responses.tools import joined
from protocol.dialects.tools import Arguments, CallId, FunctionName
from protocol.messages.media import Media
from protocol.messages.text import Role, Turn
from protocol.messages.tools import ToolCall
from protocol.strict.checks import Holds
from protocol.strict.mistakes import Mistake, describe
from protocol.strict.objects import FieldCheck, Harmless
from protocol.strict.tagged import tag

CONTINUES = "previous_response_id"


@frozen
class InputText:
    """A piece of text."""

    harmless: ClassVar[Harmless] = {
        "annotations": (list,),  # of an earlier answer
        "logprobs": (list,),
        **CACHE_HINTS,
    }

    type: Literal["input_text", "output_text"] = attrs.field(metadata=tag())
    text: str

    def piece(self, _: str) -> str:
        """Return the text."""
        return self.text


@frozen
class InputImage(MediaPart):
    """An image: a data URL, or a URL from which this server may fetch; files are not uploaded here."""

    harmless: ClassVar[Harmless] = {**CACHE_HINTS, "file_id": ()}

    type: Literal["input_image"] = attrs.field(metadata=tag())
    image_url: MediaUrl | None = None  # null beside a `file_id`, which is refused by its name
    detail: DetailName | None = None

    def piece(self, path: str) -> Media:
        """Return the image."""
        return image(self.image_url or "", f"{path}.image_url", self.detail)

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (lambda: _missing("image_url", self.image_url),)


@frozen
class InputVideo(MediaPart):
    """A video: a data URL, or a URL from which this server may fetch; files are not uploaded here."""

    harmless: ClassVar[Harmless] = {**CACHE_HINTS, "file_id": (), "fps": ()}

    type: Literal["input_video"] = attrs.field(metadata=tag())
    video_url: MediaUrl | None = None

    def piece(self, path: str) -> Media:
        """Return the video."""
        return video(self.video_url or "", f"{path}.video_url")

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (lambda: _missing("video_url", self.video_url),)


InputPart: TypeAlias = InputText | RefusalPart | InputImage | InputVideo


@frozen
class InputMessage:
    """A message of the conversation."""

    harmless: ClassVar[Harmless] = {"id": (str,), "status": (str,), "phase": (str,), **CACHE_HINTS}

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[tuple[InputPart, ...], Holds(1)]
    type: Literal["message"] = attrs.field(default="message", metadata=tag())

    def turn(self, index: int) -> Turn:
        """Return the message for a processor; `index` is its place in the conversation."""
        path = f"input[{index}]"
        return Turn(Role(self.role), content_of(self.content, f"{path}.content"), param=path)

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (
            lambda: misplaced(Role(self.role), self.content, "content"),
            lambda: misplaced_refusals(Role(self.role), self.content, "content"),
        )


@frozen
class ReasoningText:
    """A piece of the reasoning of an earlier answer, or of its summary."""

    type: Literal["reasoning_text", "summary_text"] = attrs.field(metadata=tag())
    text: str


@frozen
class InputReasoning:
    """The reasoning of an earlier answer; one that only another server can read is refused."""

    harmless: ClassVar[Harmless] = {"id": (str,), "status": (str,), "encrypted_content": ()}
    role: ClassVar[Role] = Role.ASSISTANT

    type: Literal["reasoning"] = attrs.field(metadata=tag())
    summary: tuple[ReasoningText, ...] | None = None
    content: tuple[ReasoningText, ...] | None = None

    def turn(self, index: int) -> Turn:
        """Return a turn that has the reasoning alone, or its summary where no more of it was given."""
        text = "".join(part.text for part in self.content or self.summary or ())
        return Turn(self.role, "", param=f"input[{index}]", reasoning=text)


@frozen
class FunctionCallItem:
    """A call in an earlier answer."""

    harmless: ClassVar[Harmless] = {
        "id": (str,),
        "status": (str,),
        "async": (False,),
        "caller": ({"type": "direct"},),
        **CACHE_HINTS,
    }
    role: ClassVar[Role] = Role.ASSISTANT

    call_id: CallId
    name: FunctionName
    arguments: Arguments
    namespace: FunctionName | None = None
    type: Literal["function_call"] = attrs.field(kw_only=True, metadata=tag())

    def turn(self, index: int) -> Turn:
        """Return a turn that has the call alone."""
        call = ToolCall(self.call_id, joined(self.namespace, self.name), self.arguments.text)
        return Turn(self.role, "", param=f"input[{index}]", calls=(call,))


@frozen
class FunctionCallOutput:
    """The result of a call."""

    harmless: ClassVar[Harmless] = {
        "id": (str,),
        "status": (str,),
        "caller": ({"type": "direct"},),
        **CACHE_HINTS,
    }
    role: ClassVar[Role] = Role.TOOL

    call_id: CallId
    output: str | tuple[InputText | InputImage | InputVideo, ...]
    type: Literal["function_call_output"] = attrs.field(kw_only=True, metadata=tag())

    def turn(self, index: int) -> Turn:
        """Return the result for a processor."""
        path = f"input[{index}]"
        content = content_of(self.output, f"{path}.output")
        return Turn(self.role, content, param=path, call_id=self.call_id)


InputItem: TypeAlias = InputMessage | InputReasoning | FunctionCallItem | FunctionCallOutput


def turns_of(items: Sequence[InputItem]) -> tuple[Turn, ...]:
    """Return the turns of an input: reasoning, a message and calls that follow each other are one answer."""
    turns: list[Turn] = []
    for index, item in enumerate(items):
        turn = item.turn(index)
        if turns and _goes_on(turns[-1], item):
            turns[-1] = _joined_turn(turns[-1], turn)
        else:
            turns.append(turn)
    return tuple(turns)


def _goes_on(last: Turn, item: InputItem) -> bool:
    """Return whether an item belongs to the same answer as the item before it, whose turn is `last`."""
    if last.role is not Role.ASSISTANT or item.role != Role.ASSISTANT:
        return False
    # A message begins an answer, unless reasoning or calls of the same answer come first; calls belong to any answer.
    return isinstance(item, FunctionCallItem) or bool(last.calls) or not last.content


def _joined_turn(first: Turn, second: Turn) -> Turn:
    content = first.content or second.content
    if first.content and second.content:
        # The text before a call and the text behind it follow each other, where parts are joined by a blank.
        content = first.text + second.text
    reasoning, calls = first.reasoning + second.reasoning, first.calls + second.calls
    return evolve(first, content=content, reasoning=reasoning, calls=calls)


def unknown_calls(items: str | Sequence[InputItem], history: Sequence[Turn] = ()) -> Iterator[Mistake]:
    """Yield a mistake for each result of a call that stands neither before it nor in the history."""
    calls = {call.id for turn in history for call in turn.calls}
    for index, item in enumerate(() if isinstance(items, str) else items):
        if isinstance(item, FunctionCallItem):
            calls.add(item.call_id)
        elif isinstance(item, FunctionCallOutput) and item.call_id not in calls:
            message = f"no function_call before it has the id {describe(item.call_id)}; send the call, too"
            yield Mistake(f"input[{index}].call_id", message)


def continued(turn: Turn) -> Turn:
    """Return a turn as a part of a conversation that a later request continues; errors name that request's field."""
    if isinstance(turn.content, str):
        return evolve(turn, param=CONTINUES)
    content = [part if isinstance(part, str) else evolve(part, param=CONTINUES) for part in turn.content]
    return evolve(turn, content=tuple(content), param=CONTINUES)


def _missing(name: str, url: str | None) -> Iterator[Mistake]:
    """Yield a mistake if an image or a video has no URL."""
    if url is None:
        yield Mistake(name, "is missing")
