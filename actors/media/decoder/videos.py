"""Videos, by FFmpeg's libraries: their size, frames and duration from their container, and the pixels of some frames.

Only the demuxer of the sniffed container and the decoders of a short list may read a content, and no demuxer can open
anything beside it. A packet is counted as a frame, which reads a whole file without decoding it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from typing import TypeAlias

import av
import av.error
import av.logging
import av.stream
import av.subtitles.codeccontext
import av.subtitles.stream  # what PyAV would import at the first use: in the sandbox nothing can be imported
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from actors.media.decoder.content import ContentRefusal
from actors.media.decoder.images import check_size
from actors.media.decoder.sniffing import ContentKind
from actors.media.jobs import Bounds, VideoFacts

CODECS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4")
FPS_MAX = 1_000.0
NAMES = {ContentKind.MP4: "MP4", ContentKind.MATROSKA: "Matroska", ContentKind.AVI: "AVI"}
_UPRIGHT = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
CORRUPT = (av.error.FFmpegError, OSError, ValueError, IndexError, EOFError)

OpenedVideo: TypeAlias = tuple[InputContainer, VideoStream]

av.logging.set_level(None)


def inspect(content: bytes, kind: ContentKind, bounds: Bounds) -> VideoFacts:
    """Return the size, the frames and the rate of a video; decodes its first frame alone. Raises `ContentRefusal`."""
    with closing(_opened(content, kind, bounds.pixels_max)) as container:
        stream = _stream(container)
        check_size(stream.codec_context.height, stream.codec_context.width, bounds)
        frames = _count(container, stream, bounds.frames_max)
        fps = _fps(container, stream, frames)
        if frames / fps > bounds.seconds_max:
            raise ContentRefusal(f"it lasts {frames / fps:.1f} s; the limit is {bounds.seconds_max:g} s", "too_large")
        try:
            container.seek(0)
            frame = next(container.decode(stream), None)
        except CORRUPT as error:
            raise ContentRefusal("its first frame is corrupt") from error
        if frame is None:
            raise ContentRefusal("it has no frame that can be decoded")
        check_size(frame.height, frame.width, bounds)
        height, width = (frame.width, frame.height) if _turn(frame) % 180 else (frame.height, frame.width)
    return VideoFacts(height, width, frames, fps)


def decode(
    content: bytes, kind: ContentKind, facts: VideoFacts, height: int, width: int, kept: tuple[int, ...]
) -> Iterator[bytes]:
    """Yield the RGB pixels of the frames that are kept, resized to a height and width; raises `ContentRefusal`."""
    if not kept or list(kept) != sorted(kept) or kept[0] < 0 or kept[-1] >= facts.frames:
        raise ContentRefusal("the frames that are to be kept are not in order", "bug")
    with closing(_opened(content, kind, facts.height * facts.width)) as container:
        frames = _frames(container, facts)
        decoded, pixels = -1, b""
        for index in kept:
            while decoded < index:
                frame = next(frames, None)
                if frame is None:
                    raise ContentRefusal(
                        f"it is truncated: only {decoded + 1} of its {facts.frames} frames can be decoded"
                    )
                decoded += 1
                if decoded == index:
                    pixels = _pixels(frame, facts, height, width)
            yield pixels


def _frames(container: InputContainer, facts: VideoFacts) -> Iterator[VideoFrame]:
    index = 0
    try:
        for frame in container.decode(_stream(container)):
            if {frame.height, frame.width} != {facts.height, facts.width}:
                raise ContentRefusal(f"frame {index} has {frame.width} x {frame.height} pixels: other than the first")
            yield frame
            index += 1
    except CORRUPT as error:
        raise ContentRefusal(f"frame {index} is corrupt") from error


def _pixels(frame: VideoFrame, facts: VideoFacts, height: int, width: int) -> bytes:
    plane = frame.reformat(format="rgb24", threads=1).planes[0]  # further threads would have to be started
    image = Image.frombytes("RGB", (frame.width, frame.height), bytes(plane), "raw", "RGB", plane.line_size, 1)
    if (step := _UPRIGHT.get(_turn(frame))) is not None:
        image = image.transpose(step)
    if image.size != (facts.width, facts.height):
        raise ContentRefusal("it turns while it is shown")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return image.tobytes()


def _turn(frame: VideoFrame) -> int:
    """Return by how many degrees a frame is turned counter-clockwise to stand upright; 0 for an angle between."""
    return frame.rotation % 360 if frame.rotation % 90 == 0 else 0


def _opened(content: bytes, kind: ContentKind, pixels_max: int) -> InputContainer:
    options = {
        "codec_whitelist": ",".join(CODECS),
        "protocol_whitelist": "none",
        "max_pixels": str(pixels_max),
        "err_detect": "explode",
        "max_streams": "16",
    }
    try:
        opened = av.open(io.BytesIO(content), format=kind.value, options=options)
    except CORRUPT as error:
        raise ContentRefusal(f"the header of the {NAMES[kind]} video is corrupt, or it is truncated") from error
    assert isinstance(opened, InputContainer)
    return opened


def _stream(container: InputContainer) -> VideoStream:
    streams = [stream for stream in container.streams.video if not stream.disposition & _ATTACHED_PICTURE]
    if not streams:
        raise ContentRefusal("it has no video", "unsupported")
    stream = streams[0]
    if stream.codec_context is None or stream.codec_context.name not in CODECS:  # FFmpeg found no decoder of the list
        raise ContentRefusal(f"its codec is not supported: send {', '.join(CODECS[:4])}, av1 or mpeg4", "unsupported")
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    return stream


def _count(container: InputContainer, stream: VideoStream, frames_max: int) -> int:
    """Return how many frames a stream has: as many as its packets; raises `ContentRefusal` for too many or too few."""
    frames = dropped = 0
    try:
        for packet in container.demux(stream):
            shown = packet.size > 0 and not packet.is_discard
            frames += shown
            dropped += packet.size > 0 and not shown
            if frames > frames_max:
                raise ContentRefusal(f"it has more than {frames_max:,} frames", "too_large")
    except CORRUPT as error:
        raise ContentRefusal(f"its container is corrupt behind frame {frames}") from error
    if frames + dropped < stream.frames:
        raise ContentRefusal(f"it is truncated: it has {frames} frames of {stream.frames}")
    if not frames:
        raise ContentRefusal("it has no frames")
    return frames


def _fps(container: InputContainer, stream: VideoStream, frames: int) -> float:
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if not 0 < rate <= FPS_MAX and container.duration:
        rate = frames * av.time_base / container.duration
    if not 0 < rate <= FPS_MAX:
        raise ContentRefusal("it does not tell how many frames are shown in a second")
    return rate


_ATTACHED_PICTURE = av.stream.Disposition.attached_pic
