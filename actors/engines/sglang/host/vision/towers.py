"""Vision towers of SGLang's models: where they are left out, and how they compute.

Where another process encodes, an engine needs no tower, and an encoder needs nothing else.

SGLang has options for both halves and loads the other one all the same: with `language_only` the vision tower of both
families here, with `encoder_only` the language model of one. So the classes of what is left out are replaced before the
model is made, and the weights of the other part alone are loaded.

An engine's tower computes all images of a step together, of one prompt and of many. The embeddings of an image then
differ, in their last bits, with its neighbours, and are cached: a greedy answer would depend on who else asked before.
On a CPU each image is computed by itself, as by an encoder there, which costs some of the time for small images alone.
Written for SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import TypeAlias

import torch
from attrs import frozen

TOWER = "visual"  # a part of the name of each weight of a vision tower

Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]
EncodePixels: TypeAlias = Callable[[object, Sequence[object]], torch.Tensor]


@frozen
class Family:
    """The names of the parts of a family's models in SGLang."""

    module: str
    model: str
    tower: str
    language: tuple[str, ...]


FAMILIES = (
    Family(
        "sglang.srt.models.qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VisionTransformer",
        ("Qwen2Model", "ParallelLMHead"),
    ),
    Family(
        "sglang.srt.models.qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VisionTransformer",
        ("Qwen2Model", "ParallelLMHead"),
    ),
)


class Absent(torch.nn.Module):
    """A stand-in for a part that is left out: it has no weights, and nothing can be computed with it."""

    dtype = torch.float32
    embed_tokens = None  # read by a language model whose head shares them

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, *_: object, **__: object) -> torch.Tensor:
        """Raise `RuntimeError`."""
        raise RuntimeError("this part of the model was left out in this process")


def leave_out_towers() -> None:
    """Let every model that is made in this process from now on be without its vision tower."""
    for family in FAMILIES:
        module = import_module(family.module)
        _replace(module, family.tower)
        _load_only(module, family.model, lambda name: TOWER not in name)


def leave_out_language() -> None:
    """Let every model that is made in this process from now on be its vision tower alone."""
    for family in FAMILIES:
        module = import_module(family.module)
        for name in family.language:
            _replace(module, name)
        _load_only(module, family.model, lambda name: TOWER in name)


def encode_items_alone() -> None:
    """Let the towers of this process compute one item at a time."""
    for family in FAMILIES:
        model = getattr(import_module(family.module), family.model)
        for name in ("get_image_feature", "get_video_feature"):
            setattr(model, name, _one_by_one(getattr(model, name)))


def _one_by_one(encode: EncodePixels) -> Callable[[object, Sequence[object]], list[torch.Tensor]]:
    def encoded(self: object, items: Sequence[object]) -> list[torch.Tensor]:
        return [encode(self, [item]) for item in items]  # a list is what SGLang takes for embeddings of their own

    return encoded


def _replace(module: ModuleType, name: str) -> None:
    if not isinstance(getattr(module, name), type):
        raise TypeError(f"{module.__name__}.{name} is no class: this is another version of SGLang")
    setattr(module, name, Absent)


def _load_only(module: ModuleType, model: str, wanted: Callable[[str], bool]) -> None:
    model_class = getattr(module, model)
    load = model_class.load_weights

    def load_weights(self: object, weights: Weights) -> object:
        return load(self, ((name, weight) for name, weight in weights if wanted(name)))

    model_class.load_weights = load_weights
