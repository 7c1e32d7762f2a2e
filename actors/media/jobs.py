"""The jobs of decoder processes and their answers: JSON in packets, with descriptors beside them.

Both sides read these types strictly. A decoder works on a client's bytes, so a node trusts none of its answers: sizes,
shapes and seals are checked again where they arrive (`supervisor/media/decoding.py`).

A job is sent to the template of all decoders with two descriptors: a socket for the answers and the content. It is
answered by `Opened` and `InspectedHeader`, or by `Decoded`, or by `Refused`; `JobEnded` comes last, as its process has
ended.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from protocol.messages.media import Modality
from protocol.tensors import Dtype

READY = b"ready"
FILTERED_MACHINES = ("x86_64", "aarch64")  # those whose system calls the filter of decoders knows
PACKET_BYTES_MAX = 64 * 1024
"""The most bytes of one packet, either way: the kept frames of a video are its longest part."""
DETAIL_CHARACTERS_MAX = 300


class Bounds(msgspec.Struct, frozen=True):
    """Limits of what may be decoded; pixels are height times width, frames those of the file."""

    pixels_max: int
    aspect_max: float = 200.0  # the longer side divided by the shorter one
    frames_max: int = 10_000
    seconds_max: float = 600.0


class ImageFacts(msgspec.Struct, frozen=True, tag="image"):
    """The size of an image in pixels, once it stands upright."""

    height: int
    width: int


class VideoFacts(msgspec.Struct, frozen=True, tag="video"):
    """The size of a video in pixels, its frames, and how many of them are shown in a second."""

    height: int
    width: int
    frames: int
    fps: float


class EmbeddingFacts(msgspec.Struct, frozen=True, tag="embeddings"):
    """The shape and type of embeddings that a client has computed, and the grid of their image in patches."""

    tokens: int
    width: int
    dtype: Dtype
    grid: tuple[int, int, int]


Facts: TypeAlias = ImageFacts | VideoFacts | EmbeddingFacts


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Compute the digest of a content, and read the facts in its header.

    A content that `is_data_url` is the text of one; its decoded bytes come back with `Opened`, in a descriptor.
    """

    modality: Modality
    is_data_url: bool
    bytes_max: int  # the content's
    bounds: Bounds


class DecodeContent(msgspec.Struct, frozen=True, tag="decode"):
    """Decode a content with these facts, resized to a height and width if they differ.

    Of a video these `frames` are kept, in this order, each as often as it is named.
    """

    facts: Facts
    height: int = 0
    width: int = 0
    frames: tuple[int, ...] = ()


class JobLimits(msgspec.Struct, frozen=True):
    """The limits of a job's process: processor time, address space, and the size of a file that it writes."""

    cpu_s: int
    memory_bytes: int
    output_bytes: int


class Job(msgspec.Struct, frozen=True):
    """One job, for one process."""

    task: Inspect | DecodeContent
    limits: JobLimits


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The SHA-256 of a content; sent before any of it is parsed: no content can change its own digest."""

    digest: str
    size_bytes: int


class InspectedHeader(msgspec.Struct, frozen=True, tag="inspected"):
    """The facts about a content."""

    facts: Facts


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    """A content has been decoded into the file that comes with this."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A content is refused, with a sentence for the client."""

    code: Literal["invalid", "unsupported", "too_large", "memory", "bug"]
    detail: str


class JobEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A job's process has ended, by a signal if that is not 0; there never was one if it is negative."""

    signal: int


JobAnswer: TypeAlias = Opened | InspectedHeader | Decoded | Refused | JobEnded

encode = msgspec.json.Encoder().encode
decode_job = msgspec.json.Decoder(Job).decode
decode_answer = msgspec.json.Decoder(JobAnswer).decode
