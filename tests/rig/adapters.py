"""LoRA adapters of the tiny model: in PEFT's files, with drawn numbers that are large enough to change its tokens."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from bench.rig.node import ROOT

TINY = ROOT / "examples" / "tiny"
RANK = 4
ALPHA = 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OF_LAYER = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}

Shapes = Mapping[str, tuple[int, ...]]


@cache
def model_shapes(model: Path = TINY) -> Shapes:
    """Return the shape of each tensor of a model."""
    raw = (model / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    return {name: tuple(value["shape"]) for name, value in header.items() if name != "__metadata__"}


def write_tensors(file: Path, shapes: Shapes, seed: int, scale: float = 0.5) -> None:
    """Write tensors of drawn 32-bit numbers."""
    chance, header, data = Random(seed), dict[str, Any](), bytearray()
    for name, shape in shapes.items():
        numbers = [chance.uniform(-scale, scale) for _ in range(prod(shape))]
        begin = len(data)
        data += struct.pack(f"<{len(numbers)}f", *numbers)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def adapter_shapes(
    rank: int = RANK, modules: Sequence[str] = MODULES, model: Path = TINY
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors, by PEFT's names."""
    shapes, layers = dict[str, tuple[int, ...]](), 0
    whole = model_shapes(model)
    while f"model.layers.{layers}.self_attn.q_proj.weight" in whole:
        layers += 1
    for layer in range(layers):
        for module in modules:
            name = f"model.layers.{layer}.{OF_LAYER[module]}.{module}"
            outputs, inputs = whole[f"{name}.weight"]
            shapes[f"base_model.model.{name}.lora_A.weight"] = (rank, inputs)
            shapes[f"base_model.model.{name}.lora_B.weight"] = (outputs, rank)
    return shapes


def write_adapter(
    folder: Path,
    seed: int = 1,
    *,
    rank: int = RANK,
    modules: Sequence[str] = MODULES,
    shapes: Shapes | None = None,
    **configuration: Any,
) -> Path:
    """Write an adapter of the tiny model into a new folder, and return the folder."""
    folder.mkdir(parents=True)
    usual = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(TINY),
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(modules),
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(usual | configuration))
    write_tensors(folder / "adapter_model.safetensors", shapes or adapter_shapes(rank, modules), seed)
    return folder


@cache
def tiny_adapter(seed: int = 1) -> str:
    """Return the folder of an adapter of the tiny model, the same one in all tests of this run."""
    folder = TemporaryDirectory(prefix="adapter-")
    _kept.append(folder)
    return str(write_adapter(Path(folder.name) / f"seed-{seed}", seed))


_kept: list[TemporaryDirectory[str]] = []  # until this process ends
