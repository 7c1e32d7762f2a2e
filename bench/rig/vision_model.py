"""The vision model of `examples/` without its weights, for simulated engines, which need no more.

The most pixels of an image are chosen, since the tokens of an image and the bytes that cross links grow with them.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.rig.node import ROOT

MODEL = ROOT / "examples" / "tiny-vision"
IMAGE_TOKEN, VIDEO_TOKEN = 6, 7  # by its config.json
FACTOR = 28  # the side of the square of pixels that one token stands for
PIXELS_MIN = 4 * FACTOR**2
PIXELS_MAX = 256 * FACTOR**2


def write_vision_model(folder: Path, *, pixels_max: int = PIXELS_MAX) -> Path:
    """Write the files of the model into a folder, which must not exist, and return it."""
    folder.mkdir()
    for path in (*MODEL.glob("*.json"), *MODEL.glob("*.jinja")):
        (folder / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*preprocessor_config.json"):
        pixels = {"min_pixels": PIXELS_MIN, "max_pixels": pixels_max}
        path.write_text(json.dumps(json.loads(path.read_text()) | pixels))
    return folder
