"""The files of a LoRA adapter, checked against its model before an engine loads them.

An engine that loads a tensor of a wrong shape notices it at the first request, in its scheduler, which ends. And it
leaves out in silence what it does not know: another scaling, biases, modules beside the linear ones. So a folder is
read here first, by its configuration and the header of its weights, and refused with a sentence. Only safetensors are
accepted: reading any other format of weights may run code.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Mapping
from hashlib import blake2b
from itertools import groupby
from math import isfinite, prod
from pathlib import Path

from attrs import Factory, frozen

from actors.engines.model_files import sampled

CONFIGURATION = "adapter_config.json"
CONFIGURATION_BYTES_MAX = 2**20
HEADER_BYTES_MAX = 2**26
ALL = "all"
"""In the place of the target modules: every linear layer."""
DIGEST_BYTES = 8
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""The types of an adapter's tensors, with their bytes a number."""

# Keys of PEFT without an effect in engines: only these values mean the same to both.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
}
TOGETHER = (("q_proj", ("q_proj", "v_proj"), ("k_proj", "v_proj")), ("gate_proj", ("gate_proj",), ("up_proj",)))
"""Layers that an engine computes at once: which ones must be adapted if one of the others is."""
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>[A-Za-z0-9_.]{1,200})\.lora_(?P<side>[AB])\.weight")


class AdapterMistake(ValueError):
    """The files of an adapter cannot be used; the text is a sentence for an operator."""


@frozen
class AdapterFiles:
    """The checked files of an adapter."""

    digest: str
    rank: int
    modules: tuple[str, ...]  # the names of its adapted layers, without what is before them


@frozen
class AdapterBounds:
    """The largest rank of an engine's adapters, and the modules that they may change, or `ALL`.

    `weights` is the pattern of the name of the file of weights. If an engine `fuses` layers, it has one place for all
    layers of a fused one, and takes them by the name of any.
    """

    rank_max: int
    modules: tuple[str, ...] = (ALL,)
    weights: str = "*.safetensors"
    fuses: bool = True


@frozen(kw_only=True)
class AdapterLimits:
    """The limits on an engine's adapters, and the folders of its first ones by name."""

    bounds: AdapterBounds
    loaded_max: int
    active_max: int | None = None  # in one engine step; None: all that are loaded
    folders: dict[str, str] = Factory(dict)
    dispensable: tuple[str, ...] = ()  # names of those without which it may start


def check_adapter(folder: Path, model: Path, bounds: AdapterBounds) -> AdapterFiles:
    """Return the files in a folder of an adapter for a model; raises `AdapterMistake` with what is wrong."""
    if not folder.is_dir():
        raise AdapterMistake(f"there is no folder {folder}")
    configuration = _configuration(folder / CONFIGURATION)
    rank = _rank(configuration, bounds)
    if (folder / "added_tokens.json").exists():
        raise AdapterMistake("it adds tokens to the vocabulary (added_tokens.json), which an engine does not do")
    weights = sorted(folder.glob("*.safetensors"))
    if len(weights) != 1:
        raise AdapterMistake(f"it must have its weights in one file of safetensors, and has {len(weights)}")
    if not weights[0].match(bounds.weights):
        raise AdapterMistake(f"its weights are in {weights[0].name}, and this engine reads {bounds.weights}")
    if not weights[0].is_file():  # a pipe would be read for ever
        raise AdapterMistake(f"{weights[0].name} is no file")
    shapes = _layers(_header(weights[0]))
    _check_layers(shapes, _model_shapes(model), rank)
    modules = {name.rpartition(".")[2] for name in shapes}
    _check_modules(modules, bounds)
    digest = blake2b((folder / CONFIGURATION).read_bytes() + sampled(weights[0]), digest_size=DIGEST_BYTES)
    return AdapterFiles(digest.hexdigest(), rank, tuple(sorted(modules)))


# The configuration ---------------------------------------------------------------------------


def _configuration(file: Path) -> dict[str, object]:
    if not file.is_file():
        raise AdapterMistake(f"it has no {CONFIGURATION}")
    if file.stat().st_size > CONFIGURATION_BYTES_MAX:
        raise AdapterMistake(f"its {CONFIGURATION} has more than {CONFIGURATION_BYTES_MAX} bytes")
    try:
        read: object = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterMistake(f"its {CONFIGURATION} is no JSON: {error}") from None
    if not isinstance(read, dict):
        raise AdapterMistake(f"its {CONFIGURATION} is no object")
    return read


def _rank(configuration: Mapping[str, object], bounds: AdapterBounds) -> int:
    """Return the rank of an adapter whose configuration an engine follows to the letter."""
    if str(configuration.get("peft_type")).upper() != "LORA":
        raise AdapterMistake(f"its peft_type is {configuration.get('peft_type')!r:.40}, and only LORA is computed")
    for key, values in NEUTRAL.items():
        if key in configuration and configuration[key] not in values:
            raise AdapterMistake(f"its {key} is {configuration[key]!r:.60}, which an engine would leave out")
    rank, alpha = configuration.get("r"), configuration.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterMistake(f"its rank (r) is {rank!r:.40}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not isfinite(alpha):
        raise AdapterMistake(f"its lora_alpha is {alpha!r:.40}")
    if rank > bounds.rank_max:
        raise AdapterMistake(f"its rank is {rank}, and max_rank is {bounds.rank_max}")
    targets = configuration.get("target_modules")
    if not (targets in (ALL, "all-linear") or (isinstance(targets, list) and all(isinstance(t, str) for t in targets))):
        raise AdapterMistake(f"its target_modules are {targets!r:.60}; expected a list of names, or all-linear")
    return rank


# The weights ---------------------------------------------------------------------------------


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and the shape of each tensor of a file, whose data must be there in full."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        begin = opened.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
        if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
            raise AdapterMistake(f"{file.name} is no file of safetensors")
        text = opened.read(length)
    try:
        read = json.loads(text)
        return {name: _entry(value, size - 8 - length) for name, value in read.items() if name != "__metadata__"}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise AdapterMistake(f"{file.name} is no whole file of safetensors") from None


def _entry(value: Mapping[str, object], data_bytes: int) -> tuple[str, tuple[int, ...]]:
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError
    begin, end = offsets
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise TypeError
    if not begin <= end <= data_bytes or (dtype in DTYPES and end - begin != prod(shape) * DTYPES[dtype]):
        raise ValueError
    return dtype, tuple(shape)


def _layers(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the two matrices of each adapted layer, by the layer's name and by A and B."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in tensors.items():
        if (matched := _TENSOR.fullmatch(name)) is None:
            raise AdapterMistake(f"its tensor {name!r:.120} is not a matrix of a linear layer's adapter")
        if dtype not in DTYPES or len(shape) != 2:
            raise AdapterMistake(f"its tensor {name:.120} is of {dtype} with {len(shape)} dimensions; expected two")
        layers.setdefault(matched["module"], {})[matched["side"]] = shape
    if not layers:
        raise AdapterMistake("its weights have no tensor")
    return layers


def _model_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model's folder."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise AdapterMistake(f"its shapes cannot be compared: the model in {model} has no safetensors")
    return {name: shape for file in files for name, (_, shape) in _header(file).items()}


def _check_layers(
    layers: Mapping[str, Mapping[str, tuple[int, ...]]], model: Mapping[str, tuple[int, ...]], rank: int
) -> None:
    for name, sides in layers.items():
        if sides.keys() != {"A", "B"}:
            raise AdapterMistake(f"its layer {name:.120} has one matrix of two")
        if (whole := model.get(f"{name}.weight")) is None or len(whole) != 2:
            raise AdapterMistake(f"its layer {name:.120} is no linear layer of the model")
        expected = {"A": (rank, whole[1]), "B": (whole[0], rank)}
        for side, shape in sides.items():
            if shape != expected[side]:
                raise AdapterMistake(
                    f"its tensor {name:.120}.lora_{side} has the shape {list(shape)}, and the model and the rank"
                    f" demand {list(expected[side])}"
                )
    _check_fused(layers)


def _check_fused(layers: Collection[str]) -> None:
    """Raise `AdapterMistake` where only some layers are adapted of those that an engine computes at once."""
    of_parent = groupby(sorted(layers), lambda name: name.rpartition(".")[0])
    for parent, names in of_parent:
        adapted = {name.rpartition(".")[2] for name in names}
        for first, needed, others in TOGETHER:
            if adapted & {first, *others} and not adapted.issuperset(needed):
                raise AdapterMistake(
                    f"it adapts {', '.join(sorted(adapted & {first, *others}))} of {parent:.120}, and an engine needs"
                    f" {' and '.join(needed)} as well"
                )


def _check_modules(modules: Collection[str], bounds: AdapterBounds) -> None:
    """Raise `AdapterMistake` for modules that the engine has no memory for."""
    if ALL in bounds.modules:
        return
    place = FUSED if bounds.fuses else {}
    taken = {place.get(module, module) for module in bounds.modules}
    if others := sorted(module for module in modules if place.get(module, module) not in taken):
        raise AdapterMistake(f"it adapts {', '.join(others)}, and target_modules are {', '.join(bounds.modules)}")
