"""Images and videos among the parts of a message: what all dialects have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Protocol, TypeAlias

from protocol.dialects.media_urls import LocatesMedia
from protocol.messages.media import Detail, Media, Modality
from protocol.messages.text import Role
from protocol.strict.mistakes import Mistake

MEDIA_MAX = 256  # of one request, with the conversation that it continues; what a model allows is less

MediaUrl: TypeAlias = Annotated[str, LocatesMedia()]
DetailName: TypeAlias = Literal["auto", "low", "high", "original"]

_DETAILS: Mapping[DetailName | None, Detail] = {
    None: Detail.AUTO,
    "auto": Detail.AUTO,
    "low": Detail.LOW,
    "high": Detail.HIGH,
    "original": Detail.HIGH,  # as large as the model allows, which is all that it means elsewhere
}


class Part(Protocol):
    """A part of a message."""

    def piece(self, path: str) -> str | Media:
        """Return the text, or the image or video; `path` is the client's name of the part."""


class MediaPart:
    """A part of a message that is an image or a video."""

    @abstractmethod
    def piece(self, path: str) -> Media:
        """Return the image or video; `path` is the client's name of the part."""


def image(url: str, param: str, detail: DetailName | None = None) -> Media:
    """Return an image; `param` is the client's name of the field that has its URL."""
    return Media(Modality.IMAGE, url, _DETAILS[detail], param)


def video(url: str, param: str) -> Media:
    """Return a video; `param` is the client's name of the field that has its URL."""
    return Media(Modality.VIDEO, url, param=param)


def content_of(parts: str | Sequence[Part], path: str) -> str | tuple[str | Media, ...]:
    """Return the content of a turn, with its parts as they are. `path` is the field's name."""
    if isinstance(parts, str):
        return parts
    return tuple([part.piece(f"{path}[{index}]") for index, part in enumerate(parts)])


def media_count(parts: str | Sequence[Part] | None) -> int:
    """Return the number of images and videos in the content of a message."""
    return 0 if parts is None or isinstance(parts, str) else sum(isinstance(part, MediaPart) for part in parts)


def misplaced(role: Role, parts: str | Sequence[Part] | None, path: str) -> Iterator[Mistake]:
    """Yield a mistake if a message that is not the user's has an image or a video: OpenAI's APIs allow none there."""
    if role is Role.USER or parts is None or isinstance(parts, str):
        return
    if (index := next((index for index, part in enumerate(parts) if isinstance(part, MediaPart)), None)) is not None:
        yield Mistake(f"{path}[{index}]", f"only messages of the user can have images and videos, not one of {role}")


def excess(count: int, path: str) -> Iterator[Mistake]:
    """Yield a mistake if a request has too many images and videos."""
    if count > MEDIA_MAX:
        yield Mistake(path, f"has {count} images and videos; a request can have at most {MEDIA_MAX}")
