"""The items of a request's `input`: messages, and the parts of which their content may consist.

Images are `input_image` parts. OpenAI has no part for videos; `input_video`, with `video_url`, is the one that clients
of other servers of this API send. Other parts, audio and files, are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from protocol.messages.media import Media
from protocol.messages.text import Role, Turn
from protocol.strict.checks import Holds
from protocol.strict.mistakes import Mistake
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

    role: Role
    content: str | Annotated[tuple[InputPart, ...], Holds(1)]
    type: Literal["message"] = attrs.field(default="message", metadata=tag())

    def turn(self, index: int) -> Turn:
        """Return the message for a processor; `index` is its place in the conversation."""
        path = f"input[{index}]"
        return Turn(self.role, content_of(self.content, f"{path}.content"), param=path)

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (
            lambda: misplaced(self.role, self.content, "content"),
            lambda: misplaced_refusals(self.role, self.content, "content"),
        )


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
