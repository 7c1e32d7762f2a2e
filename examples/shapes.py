"""Pictures and short videos of coloured shapes, with questions about them and the only right answers.

They are what examples/make_tiny_vision.py trains on. Everything is drawn from tables and a random generator; nothing is
fetched. A shape's place and size are fractions of its picture, so that one scene can be drawn at any size.
"""

import colorsys
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

# name: hue in degrees, saturation and brightness, each from and to; the CSS colours of these names fall into them.
COLOURS = {
    "red": ((-6, 8), (0.8, 1.0), (0.75, 1.0)),
    "orange": ((28, 40), (0.9, 1.0), (0.9, 1.0)),
    "yellow": ((52, 62), (0.8, 1.0), (0.9, 1.0)),
    "green": ((100, 145), (0.7, 1.0), (0.5, 1.0)),
    "blue": ((210, 242), (0.7, 1.0), (0.65, 1.0)),
    "purple": ((278, 302), (0.65, 1.0), (0.5, 0.8)),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
ORDINALS = ("first", "second", "third")
# The radius of each of one to three shapes, as a fraction of the shorter side.
RADII = {1: (0.17, 0.4), 2: (0.16, 0.23), 3: (0.15, 0.2)}

# One list for each way to be asked about media; "{}" is an ordinal, or a shape with its verb.
SEE = ("What do you see?", "Describe what you see.")
SEE_PICTURE = ("What is in the picture?", "Describe the picture.", "What is in this image?")
SEE_VIDEO = ("What happens?", "What happens in the video?", "Describe the video.")
SEE_NTH = "What is in the {} picture?"
HOW_MANY = ("How many shapes are there?", "How many shapes do you see?")
WHICH_COLOUR = ("What colour {}?", "What color {}?")
NO_MEDIA = "There is no picture."


@dataclass(frozen=True)
class Item:
    """A shape in a picture: its names, its centre, its radius in shorter sides, its turn in radians."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    turn: float
    rgb: tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """What is shown in every frame, and its groups of equal shapes from left to right; a picture has one frame."""

    frames: tuple[tuple[Item, ...], ...]
    groups: tuple[tuple[int, str, str], ...]  # how many, their colour, their shape
    direction: str = ""

    @property
    def is_video(self) -> bool:
        """Whether there is more than one frame."""
        return len(self.frames) > 1

    @property
    def phrase(self) -> str:
        """What is seen, in words."""
        phrase = " and ".join(group(*each) for each in self.groups)
        return f"{phrase} moves {self.direction}" if self.direction else phrase


def sentence(phrase: str) -> str:
    """Return a phrase with a capital letter and a full stop."""
    return f"{phrase[0].upper()}{phrase[1:]}."


def group(count: int, colour: str, shape: str) -> str:
    """Return a count of shapes in words."""
    if count > 1:
        return f"{NUMBERS[count - 1]} {colour} {shape}s"
    return f"{'an' if colour == 'orange' else 'a'} {colour} {shape}"


class Artist:
    """A maker of random scenes, drawings and questions."""

    def __init__(self, seed: int) -> None:
        """Start from the seed alone."""
        self.random = random.Random(seed)

    def paint(self, colour: str) -> tuple[int, int, int]:
        """Return one of the colours that have this name."""
        hue, saturation, brightness = (self.random.uniform(*limits) for limits in COLOURS[colour])
        red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation, brightness)
        return round(red * 255), round(green * 255), round(blue * 255)

    def places(self, radii: Sequence[float], left: int, aspect: float) -> list[tuple[float, float]]:
        """Return centres, from left to right, of shapes that neither touch each other nor leave the picture.

        The first `left` of them stand clearly to the left of the others.
        """
        width, height = max(aspect, 1), max(1 / aspect, 1)  # in shorter sides
        while True:
            edge = [radius * 1.05 for radius in radii]
            centres = sorted((self.random.uniform(r, width - r), self.random.uniform(r, height - r)) for r in edge)
            apart = all(
                math.dist(one, other) > 1.3 * (radii[place] + radii[before])
                for place, one in enumerate(centres)
                for before, other in enumerate(centres[:place])
            )
            if apart and (left == len(radii) or centres[left][0] - centres[left - 1][0] > 0.25):
                return [(x / width, y / height) for x, y in centres]

    def picture(self, aspect: float) -> Scene:
        """Return a picture of one to three shapes in one group of equal ones, or in two."""
        kinds = self.random.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], 2)
        counts = self.random.choice(((1,), (1,), (2,), (2,), (3,), (3,), (1, 1), (1, 1), (1, 2), (2, 1)))
        groups = tuple((count, *kind) for count, kind in zip(counts, kinds, strict=False))
        names = [kind for count, *kind in groups for _ in range(count)]
        largest = self.random.uniform(*RADII[len(names)])
        radii = [largest * self.random.uniform(0.9, 1) for _ in names]
        paints = {colour: self.paint(colour) for colour in COLOURS}
        items = [
            Item(colour, shape, x, y, radius, self.random.uniform(-0.1, 0.1), paints[colour])
            for (colour, shape), (x, y), radius in zip(names, self.places(radii, counts[0], aspect), radii, strict=True)
        ]
        return Scene((tuple(items),), groups)

    def video(self, frames: int) -> Scene:
        """Return a video in which a shape moves in one direction."""
        colour, shape = self.random.choice(list(COLOURS)), self.random.choice(SHAPES)
        direction, (right, down) = self.random.choice(list(DIRECTIONS.items()))
        radius = self.random.uniform(0.14, 0.25)
        near, far = radius * 1.05, 1 - radius * 1.05
        length = (far - near) * self.random.uniform(0.7, 1)
        start, across = self.random.uniform(near, far - length), self.random.uniform(near, far)
        item = Item(colour, shape, across, across, radius, self.random.uniform(-0.1, 0.1), self.paint(colour))
        sequence = []
        for frame in range(frames):
            along = start + length * frame / (frames - 1)
            along = along if right + down > 0 else 1 - along
            sequence.append((replace(item, x=along) if right else replace(item, y=along),))
        return Scene(tuple(sequence), ((1, colour, shape),), direction)

    def draw(self, scene: Scene, width: int, height: int) -> list[np.ndarray]:
        """Return the frames as arrays of height, width and RGB, on white or a light grey, sometimes after JPEG."""
        background = self.random.choice((255, self.random.randint(225, 254)))
        quality = self.random.choice((0, 0, 0, self.random.randint(70, 95)))
        arrays = []
        for items in scene.frames:
            picture = Image.new("RGB", (width, height), (background,) * 3)
            pen = ImageDraw.Draw(picture)
            for item in items:
                draw_item(pen, item, width, height)
            if quality:
                file = io.BytesIO()
                picture.save(file, "JPEG", quality=quality)
                picture = Image.open(file)
            arrays.append(np.array(picture))
        return arrays

    def question(self, scenes: Sequence[Scene]) -> tuple[str, str]:
        """Return a question about all the media of a prompt, and its answer."""
        if not scenes:
            return self.random.choice((*SEE, *SEE_PICTURE, *SEE_VIDEO, *HOW_MANY)), NO_MEDIA
        if len(scenes) == 1:
            return self.question_of_one(scenes[0])
        if self.random.random() < 0.6:
            place = self.random.randrange(len(scenes))
            return SEE_NTH.format(ORDINALS[place]), sentence(scenes[place].phrase)
        return self.random.choice(SEE), sentence(", then ".join(scene.phrase for scene in scenes))

    def question_of_one(self, scene: Scene) -> tuple[str, str]:
        """Return a question about one picture or video, and its answer."""
        chance = self.random.random()
        if scene.is_video or chance < 0.5:
            questions = *SEE, *(SEE_VIDEO if scene.is_video else SEE_PICTURE)
            return self.random.choice(questions), sentence(scene.phrase)
        count, colour, shape = self.random.choice(scene.groups)
        if chance < 0.65 or len({shape for _, _, shape in scene.groups}) < len(scene.groups):
            total = sum(count for count, _, _ in scene.groups)
            return self.random.choice(HOW_MANY), sentence(NUMBERS[total - 1])
        named = f"is the {shape}" if count == 1 else f"are the {shape}s"
        return self.random.choice(WHICH_COLOUR).format(named), sentence(colour)


def draw_item(pen: ImageDraw.ImageDraw, item: Item, width: int, height: int) -> None:
    """Draw one shape, a triangle with a corner up and a square with its sides upright but for its turn."""
    x, y, radius = item.x * width, item.y * height, item.radius * min(width, height)
    if item.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=item.rgb)
        return
    corners = {"square": 4, "triangle": 3}[item.shape]
    start = item.turn - math.pi / 2 + (math.pi / 4 if item.shape == "square" else 0)
    angles = [start + 2 * math.pi * corner / corners for corner in range(corners)]
    pen.polygon([(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles], fill=item.rgb)
