"""Pictures and videos of coloured shapes with what `examples/tiny-vision` answers about them.

They are drawn anew for each seed, and by other code than that which the model was trained with: a right answer means that
the model has seen this picture and not that it knows it.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Literal

import av
import numpy as np
from attrs import frozen
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 20, 30),
    "orange": (255, 145, 0),
    "yellow": (250, 225, 20),
    "green": (20, 160, 50),
    "blue": (30, 70, 230),
    "purple": (140, 30, 170),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
CORNERS = {"square": 4, "triangle": 3}
QUESTION = "What do you see?"
"""A question about any number of pictures and videos; `answer` has what the model says to it."""
NOTHING = "There is no picture."
"""The model's answer to it when no picture came with it, or when it was lost."""
FRAMES, FRAMES_PER_S = 32, 8

Placed = tuple[str, str, float, float, float]  # colour, shape, centre and radius in pixels
Form = Literal["PNG", "JPEG"]


@frozen
class Shown:
    """A picture or a video as a file, and the phrase that says what is in it."""

    data: bytes
    mime: str
    phrase: str
    size: tuple[int, int]  # width and height in pixels

    @property
    def url(self) -> str:
        """The file as a data URL."""
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode()}"

    @property
    def part(self) -> dict[str, object]:
        """The part of a chat message that shows it."""
        kind = "video_url" if self.mime.startswith("video/") else "image_url"
        return {"type": kind, kind: {"url": self.url}}


def answer(shown: Sequence[Shown]) -> str:
    """Return what the model answers when asked what it sees."""
    phrase = ", then ".join(each.phrase for each in shown)
    return f"{phrase[0].upper()}{phrase[1:]}." if shown else NOTHING


def content(shown: Sequence[Shown], question: str = QUESTION) -> list[dict[str, object]]:
    """Return the content of the user's message that shows all of them and then asks."""
    return [*(each.part for each in shown), {"type": "text", "text": question}]


def picture(random: Random, form: Form | None = None, size: tuple[int, int] | None = None) -> Shown:
    """Return a picture of one to three shapes of one kind and colour, or of two different ones side by side."""
    side, aspect = random.randint(110, 420), random.uniform(0.8, 1.25)
    width, height = size or (round(side * aspect), round(side / aspect))
    form = form or random.choice(("PNG", "JPEG"))
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    if random.random() < 0.2:
        two = random.sample(kinds, 2)
        placed = _placed(random, two, width, height)  # from left to right
        phrase = " and ".join(_group(1, colour, shape) for colour, shape, *_ in placed)
    else:
        count, kind = random.randint(1, 3), random.choice(kinds)
        placed = _placed(random, [kind] * count, width, height)
        phrase = _group(count, *kind)
    file = io.BytesIO()
    _drawn(placed, width, height, random.choice(((255, 255, 255), (235, 238, 240)))).save(file, form)
    return Shown(file.getvalue(), f"image/{str(form).lower()}", phrase, (width, height))


def pictures(seed: int, count: int) -> list[Shown]:
    """Return so many pictures."""
    random = Random(seed)
    return [picture(random) for _ in range(count)]


def video(random: Random, size: tuple[int, int] | None = None) -> Shown:
    """Return a video of four seconds in which a shape moves."""
    width, height = size or (random.randrange(128, 208, 2), random.randrange(128, 208, 2))
    shape, colour = random.choice(SHAPES), random.choice(list(COLOURS))
    radius = min(width, height) * random.uniform(0.15, 0.25)
    direction, (right, down) = random.choice(list(DIRECTIONS.items()))
    reach = 0.5 - radius / min(width, height)
    ways = [reach * (2 * place / (FRAMES - 1) - 1) for place in range(FRAMES)]
    frames = [[(colour, shape, width * (0.5 + right * way), height * (0.5 + down * way), radius)] for way in ways]
    phrase = f"{_group(1, colour, shape)} moves {direction}"
    white = (255, 255, 255)
    return Shown(_mp4([_drawn(frame, width, height, white) for frame in frames]), "video/mp4", phrase, (width, height))


def _group(count: int, colour: str, shape: str) -> str:
    if count > 1:
        return f"{NUMBERS[count - 1]} {colour} {shape}s"
    return f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"


def _placed(random: Random, kinds: Sequence[tuple[str, str]], width: int, height: int) -> list[Placed]:
    """Return shapes that do not touch: one anywhere, more in quarters of the picture, two different ones in its halves."""
    cells = random.sample([(0, 0), (1, 0), (0, 1), (1, 1)], len(kinds)) if len(kinds) > 1 else [(0, 0)]
    if len(set(kinds)) > 1:
        cells = [(0, random.randrange(2)), (1, random.randrange(2))]
    across, down = (width, height) if len(kinds) == 1 else (width / 2, height / 2)
    radius = min(across, down) / 2 * random.uniform(0.6, 0.85)
    placed = []
    for (colour, shape), (column, row) in zip(kinds, cells, strict=True):
        x = across * column + random.uniform(radius, across - radius)
        y = down * row + random.uniform(radius, down - radius)
        placed.append((colour, shape, x, y, radius))
    return placed


def _drawn(placed: Sequence[Placed], width: int, height: int, background: tuple[int, int, int]) -> Image.Image:
    image = Image.new("RGB", (width, height), background)
    pen = ImageDraw.Draw(image)
    for colour, shape, x, y, radius in placed:
        if shape == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
            continue
        corners, points = CORNERS[shape], list[tuple[float, float]]()
        for corner in range(corners):
            angle = 2 * math.pi * (corner / corners - (0.125 if shape == "square" else 0.25))
            points.append((x + radius * math.cos(angle), y + radius * math.sin(angle)))
        pen.polygon(points, fill=COLOURS[colour])
    return image


def _mp4(images: Sequence[Image.Image]) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=FRAMES_PER_S)
        stream.width, stream.height = images[0].size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 1_000_000
        for place, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
            frame.pts, frame.time_base = place, Fraction(1, FRAMES_PER_S)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
