"""Pictures and videos as items of requests, made by the model's layout alone, without the media actor."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from random import Random

import av
from attrs import frozen
from PIL import Image
from tokenizers import Tokenizer

from actors.engines.model_files import read_files
from actors.media.layout import VisionLayout
from actors.media.model_files import vision_layout
from actors.media.placeholders import expand
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds

PLACES = {
    Modality.IMAGE: "<|vision_start|><|image_pad|><|vision_end|>",
    Modality.VIDEO: "<|vision_start|><|video_pad|><|vision_end|>",
}


@frozen
class SeeingModel:
    """The files of a model by which prompts and items are made."""

    folder: Path
    layout: VisionLayout
    tokenizer: Tokenizer

    def tokens(self, text: str, items: Sequence[MediaItem]) -> TokenIds:
        """Return the token ids of a prompt with one placeholder for each item, as many as each item has tokens."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return expand(TokenIds.of(ids), items, self.layout)

    def image(self, data: bytes) -> MediaItem:
        """Return the item of a picture's file."""
        decoded = Image.open(io.BytesIO(data)).convert("RGB")
        fit = self.layout.fit_image(decoded.height, decoded.width)
        assert fit.decoded == (decoded.height, decoded.width), "nothing is resized here"
        pixels = Tensor(Dtype.UINT8, (1, decoded.height, decoded.width, 3), memoryview(decoded.tobytes()))
        return MediaItem(Modality.IMAGE, _digest(data), fit.grid, fit.tokens, MediaForm.PIXELS, pixels)

    def video(self, data: bytes, seconds_per_grid: float | None = None) -> MediaItem:
        """Return the item of a video's file; a step of its grid lasts as long as it does, unless a time is given."""
        with av.open(io.BytesIO(data), "r") as container:
            rate = container.streams.video[0].average_rate
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert isinstance(rate, Fraction)
        sampling = self.layout.sample(len(frames), float(rate))
        height, width, _ = frames[0].shape
        fit = self.layout.fit_video(len(sampling.frames), height, width)
        assert fit.decoded == (height, width), "nothing is resized here"
        pixels = b"".join(frames[place].tobytes() for place in sampling.frames)
        shape = (len(sampling.frames), height, width, 3)
        seconds = self.layout.temporal_patch * sampling.interval_s if seconds_per_grid is None else seconds_per_grid
        tensor = Tensor(Dtype.UINT8, shape, memoryview(pixels))
        return MediaItem(Modality.VIDEO, _digest(data), fit.grid, fit.tokens, MediaForm.PIXELS, tensor, seconds)


def seeing_model(folder: Path) -> SeeingModel:
    """Return what is read of a model's folder."""
    layout = vision_layout(read_files(folder))
    assert layout is not None
    return SeeingModel(folder, layout, Tokenizer.from_file(str(folder / "tokenizer.json")))


def png(seed: int, width: int, height: int) -> bytes:
    """Return the file of a picture of random blocks."""
    chance, buffer = Random(seed), io.BytesIO()
    small = Image.frombytes("RGB", (8, 8), chance.randbytes(192))
    small.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()
