"""A model folder with a vision layout and without weights: for simulated engines, which need no more.

It is the tiny text model's tokenizer with the placeholders of images and videos, the configuration of a small
Qwen2-VL, and a chat template with parts. The most pixels of an image are chosen, since the tokens of an image and the
bytes that cross links grow with them.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.rig.node import ROOT

TEXT_MODEL = ROOT / "examples" / "tiny"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
ADDED = ("<|vision_start|>", "<|vision_end|>", IMAGE_PAD, VIDEO_PAD)
VOCABULARY = 512  # of the text model
PATCH, MERGE = 14, 2
FACTOR = PATCH * MERGE  # the side of the square of pixels that one token stands for
PIXELS_MIN = 4 * FACTOR**2
PIXELS_MAX = 256 * FACTOR**2

TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- else -%}
{{- '<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def write_vision_model(folder: Path, *, pixels_max: int = PIXELS_MAX) -> Path:
    """Write the files of the model into a folder, which must not exist, and return it."""
    folder.mkdir()
    tokenizer = json.loads((TEXT_MODEL / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == VOCABULARY
    tokenizer["added_tokens"] += [_special(token_id(name), name) for name in ADDED]
    processor = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": PIXELS_MIN, "longest_edge": pixels_max},
    }
    config = json.loads((TEXT_MODEL / "config.json").read_text()) | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": VOCABULARY + len(ADDED),
        "image_token_id": token_id(IMAGE_PAD),
        "video_token_id": token_id(VIDEO_PAD),
        "vision_config": {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2},
    }
    files = {
        "tokenizer.json": tokenizer,
        "config.json": config,
        "processor_config.json": {"image_processor": processor, "video_processor": processor},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TEXT_MODEL / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def token_id(name: str) -> int:
    """Return the id of one of the tokens that the text model lacks."""
    return VOCABULARY + ADDED.index(name)


def _special(number: int, name: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **flags, "special": True}
