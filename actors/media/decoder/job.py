"""One job in its own process: the answers to its node, and the files that come with them.

The digest of a content is sent before any of it is parsed: hijacked code can no longer change it.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable
from math import prod

from actors.media import jobs
from actors.media.decoder import content, embeddings, images, videos
from actors.media.decoder.content import ContentRefusal
from actors.media.decoder.sniffing import IMAGES, VIDEOS, ContentKind, sniff
from actors.media.jobs import (
    DecodeContent,
    Decoded,
    EmbeddingFacts,
    Facts,
    ImageFacts,
    Inspect,
    InspectedHeader,
    Opened,
    Refused,
)
from protocol.messages.media import Modality
from protocol.tensors import BYTES

SNIFFED_BYTES = 64
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def run(task: Inspect | DecodeContent, answers: socket.socket, descriptor: int) -> None:
    """Do a job and send its answers; a failure is an answer, too."""
    try:
        if isinstance(task, Inspect):
            _inspect(task, answers, descriptor)
        else:
            _decode(task, answers, descriptor)
    except ContentRefusal as refusal:
        _send(answers, Refused(refusal.code, refusal.detail))
    except MemoryError:
        _send(answers, Refused("memory", "decoding it takes more memory than it may"))
    except Exception as error:  # noqa: BLE001  # a parser's bug, on content that no test had
        _send(answers, Refused("bug", f"it could not be decoded: {type(error).__name__}"))


def _inspect(task: Inspect, answers: socket.socket, descriptor: int) -> None:
    data = content.read(descriptor)
    if task.is_data_url:
        data = content.decode_data_url(data, task.bytes_max)
    opened = Opened(content.digest(data), len(data))
    if task.is_data_url:
        _send(answers, opened, write_sealed([data]))
    else:
        _send(answers, opened)
    _send(answers, InspectedHeader(_facts(task, data)))


def _facts(task: Inspect, data: bytes) -> Facts:
    kind = sniff(data[:SNIFFED_BYTES])
    if not isinstance(kind, ContentKind):
        why = kind.reason or f"send {IMAGES if task.modality is Modality.IMAGE else VIDEOS}"
        raise ContentRefusal(f"it is {kind.name}: {why}", "unsupported")
    if task.modality is Modality.IMAGE and kind.is_video:
        raise ContentRefusal(
            f"it is a video ({videos.NAMES[kind]}), and an image is expected: send {IMAGES}", "unsupported"
        )
    if task.modality is Modality.VIDEO and not kind.is_video:
        what = f"an image ({kind})" if kind.is_image else "a safetensors file"
        raise ContentRefusal(f"it is {what}, and a video is expected: send {VIDEOS}", "unsupported")
    if kind.is_image:
        return images.inspect(data, kind, task.bounds)
    return videos.inspect(data, kind, task.bounds) if kind.is_video else embeddings.inspect(data)


def _decode(task: DecodeContent, answers: socket.socket, descriptor: int) -> None:
    data, facts = content.read(descriptor), task.facts
    kind = sniff(data[:SNIFFED_BYTES])
    assert isinstance(kind, ContentKind), "it was another kind when it was inspected"
    pieces: Iterable[bytes]
    if isinstance(facts, EmbeddingFacts):
        pieces = [embeddings.decode(data)]
        size = prod((facts.tokens, facts.width)) * BYTES[facts.dtype]
    elif isinstance(facts, ImageFacts):
        pieces = [images.decode(data, kind, task.height, task.width)]
        size = 3 * task.height * task.width
    else:
        pieces = videos.decode(data, kind, facts, task.height, task.width, task.frames)
        size = 3 * task.height * task.width * len(task.frames)
    output = write_sealed(pieces)
    assert os.lseek(output, 0, os.SEEK_END) == size, "it decoded to another size than was computed"
    _send(answers, Decoded(), output)


def write_sealed(pieces: Iterable[bytes]) -> int:
    """Write pieces into a new file in memory, seal it against changes, and return its descriptor."""
    descriptor = os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    for piece in pieces:
        left = memoryview(piece)
        while left:
            left = left[os.write(descriptor, left) :]
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def _send(answers: socket.socket, answer: jobs.JobAnswer, *descriptors: int) -> None:
    if isinstance(answer, Refused):
        answer = Refused(answer.code, answer.detail[: jobs.DETAIL_CHARACTERS_MAX])
    socket.send_fds(answers, [jobs.encode(answer)], descriptors)
