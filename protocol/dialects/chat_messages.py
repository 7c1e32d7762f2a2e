"""The messages of OpenAI chat completions, and the parts of which their content may consist.

Images are `image_url` parts, as in OpenAI's API. Videos (`video_url`) and images with precomputed embeddings
(`image_embeds`) have the names of SGLang and vLLM. Other parts, audio and files, are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

import attrs
from attrs import frozen

from protocol.dialects.media_parts import (
    DetailName,
    MediaPart,
    MediaUrl,
    content_of,
    image,
    misplaced,
    video,
)
from protocol.dialects.media_urls import EmbeddingsFile
from protocol.dialects.message_parts import CACHE_HINTS, RefusalPart, misplaced_refusals
from protocol.dialects.rendering import ONE_END, RenderingFields
from protocol.dialects.tools import CallId, FunctionCall
from protocol.messages.media import Media
from protocol.messages.text import Role, Turn
from protocol.strict.checks import Holds
from protocol.strict.mistakes import Mistake
from protocol.strict.objects import FieldCheck, Harmless
from protocol.strict.tagged import tag

NAME_CHARACTERS_MAX = 256
CALLS_MAX = 4096  # of one answer

_HINTS: Harmless = {**CACHE_HINTS, "uuid": ()}  # `uuid` names a part in caches that are not here


@frozen
class TextPart:
    """A piece of text."""

    harmless: ClassVar[Harmless] = CACHE_HINTS

    type: Literal["text"] = attrs.field(metadata=tag())
    text: str

    def piece(self, _: str) -> str:
        """Return the text."""
        return self.text


@frozen
class ImageUrl:
    """The URL of an image, and the detail in which the model sees it."""

    harmless: ClassVar[Harmless] = {  # of SGLang's server
        "max_dynamic_patch": (),
        "min_dynamic_patch": (),
        "max_long_side_pixel": (),
        "content_hash": (),
    }

    url: MediaUrl
    detail: DetailName | None = None


@frozen
class ImagePart(MediaPart):
    """An image: a data URL, or a URL from which this server may fetch."""

    harmless: ClassVar[Harmless] = {**_HINTS, "modalities": ("image",)}

    type: Literal["image_url"] = attrs.field(metadata=tag())
    image_url: ImageUrl | MediaUrl

    def piece(self, path: str) -> Media:
        """Return the image."""
        if isinstance(self.image_url, str):
            return image(self.image_url, f"{path}.image_url")
        return image(self.image_url.url, f"{path}.image_url.url", self.image_url.detail)


@frozen
class VideoUrl:
    """The URL of a video."""

    harmless: ClassVar[Harmless] = {  # of SGLang's server
        "max_dynamic_patch": (),
        "min_dynamic_patch": (),
        "max_long_side_pixel": (),
        "fps": (),
        "max_frames": (),
        "max_tokens_per_frame": (),
        "max_image_tokens": (),
    }

    url: MediaUrl


@frozen
class VideoPart(MediaPart):
    """A video: a data URL, or a URL from which this server may fetch."""

    harmless: ClassVar[Harmless] = _HINTS

    type: Literal["video_url"] = attrs.field(metadata=tag())
    video_url: VideoUrl | MediaUrl

    def piece(self, path: str) -> Media:
        """Return the video."""
        if isinstance(self.video_url, str):
            return video(self.video_url, f"{path}.video_url")
        return video(self.video_url.url, f"{path}.video_url.url")


@frozen
class EmbeddingsPart(MediaPart):
    """An image whose embeddings are computed already: a safetensors file, in base64."""

    harmless: ClassVar[Harmless] = _HINTS

    type: Literal["image_embeds"] = attrs.field(metadata=tag())
    image_embeds: EmbeddingsFile

    def piece(self, path: str) -> Media:
        """Return the image."""
        return image(self.image_embeds.url, f"{path}.image_embeds")


ChatPart: TypeAlias = TextPart | RefusalPart | ImagePart | VideoPart | EmbeddingsPart


@frozen
class ChatMessage:
    """A message of the conversation."""

    harmless: ClassVar[Harmless] = {  # stock clients send an assistant's message back with all of its fields
        **CACHE_HINTS,
        "annotations": (list,),
        "audio": (),
        "function_call": (),
        "parsed": (dict, list),  # the content once more, read by openai's client
        "phase": (str,),
    }

    role: Role = attrs.field(metadata=tag())
    content: str | Annotated[tuple[ChatPart, ...], Holds(1)] | None = None
    name: Annotated[str, Holds(0, NAME_CHARACTERS_MAX)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[tuple[FunctionCall, ...], Holds(0, CALLS_MAX)] | None = None
    tool_call_id: CallId | None = None  # of the call whose result a message of a tool is
    prefix: bool | None = None  # whether the answer goes on with this message, an extension of DeepSeek and Mistral

    def turn(self, index: int) -> Turn:
        """Return the message for a processor; `index` is its place in the conversation."""
        path, parts = f"messages[{index}]", self.content or ""
        content = parts if isinstance(parts, str) else content_of(parts, f"{path}.content")
        if self.refusal:
            pieces = (content,) if isinstance(content, str) else content
            content = (*pieces, self.refusal) if content else self.refusal
        calls = tuple(call.call() for call in self.tool_calls or ())
        reasoning = self.reasoning_content or self.reasoning or ""
        # The name in a message of a tool is that of the function, which its call has.
        name = "" if self.role is Role.TOOL else self.name or ""
        return Turn(self.role, content, name, path, reasoning, calls, self.tool_call_id or "")

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (self._check_content, self._check_answer, self._check_calls, self._check_prefix)

    def _check_content(self) -> Iterable[Mistake]:
        return () if isinstance(self.content, str) else self._mistakes_in_content()

    def _mistakes_in_content(self) -> Iterator[Mistake]:
        # Clients send an answer back as they got it, and one without text has null.
        if self.content is None and self.role is not Role.ASSISTANT:
            yield Mistake("content", "is missing")
        else:
            yield from misplaced(self.role, self.content, "content")
            yield from misplaced_refusals(self.role, self.content, "content")

    def _check_calls(self) -> Iterable[Mistake]:
        plain = self.tool_calls is None and self.tool_call_id is None and self.role is not Role.TOOL
        return () if plain else self._mistakes_of_calls()

    def _mistakes_of_calls(self) -> Iterator[Mistake]:
        if self.tool_calls and self.role is not Role.ASSISTANT:
            yield Mistake("tool_calls", f"only messages of the assistant can have calls, not one of {self.role}")
        if self.role is Role.TOOL and self.tool_call_id is None:
            yield Mistake("tool_call_id", "is missing: a message of a tool is the result of a call")
        elif self.role is not Role.TOOL and self.tool_call_id is not None:
            yield Mistake("tool_call_id", f"only messages of a tool can have one, not one of {self.role}")

    def _check_prefix(self) -> Iterable[Mistake]:
        if not self.prefix or self.role is Role.ASSISTANT:
            return ()
        return (Mistake("prefix", f"only a message of the assistant can have one, not one of {self.role}"),)

    def _check_answer(self) -> Iterable[Mistake]:
        return self._mistakes_of_answer() if self.refusal or self.reasoning or self.reasoning_content else ()

    def _mistakes_of_answer(self) -> Iterator[Mistake]:
        if self.role is not Role.ASSISTANT:
            for name in ("refusal", "reasoning_content", "reasoning"):
                if getattr(self, name):
                    yield Mistake(name, f"only messages of the assistant can have one, not one of {self.role}")
        elif self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            yield Mistake("reasoning", "differs from reasoning_content, which is another name of it; send one")


def call_mistakes(messages: Sequence[ChatMessage]) -> Iterator[Mistake]:
    """Yield a mistake for each result of a call that no earlier message has, and for each id of two calls of a message.

    Some clients count their calls anew in each message: a result is that of the nearest call.
    """
    called = set[str]()
    for index, message in enumerate(messages):
        own = set[str]()
        for place, call in enumerate(message.tool_calls or ()):
            if call.id in own:
                yield Mistake(f"messages[{index}].tool_calls[{place}].id", "is the id of an earlier call, too")
            own.add(call.id)
        called |= own
        if message.tool_call_id is not None and message.tool_call_id not in called:
            yield Mistake(f"messages[{index}].tool_call_id", "is the id of no earlier call")


def prefix_mistakes(messages: Sequence[ChatMessage], request: RenderingFields) -> Iterator[Mistake]:
    """Yield the mistakes of `prefix` beside other messages, and beside the field for the end of the prompt."""
    for index, message in enumerate(messages[:-1]):
        if message.prefix:
            yield Mistake(f"messages[{index}].prefix", "only the last message can have one: an answer goes on with it")
    if messages[-1].prefix and request.add_generation_prompt:
        yield Mistake("add_generation_prompt", f"cannot stand beside prefix: {ONE_END}")
