"""Which folders of adapters are taken, and with which sentence the others are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.engines.adapter_files import AdapterBounds, AdapterMistake, check_adapter
from tests.rig.adapters import MODULES, TINY, adapter_shapes, write_adapter, write_tensors

BOUNDS = AdapterBounds(rank_max=8)


def check(folder: Path, bounds: AdapterBounds = BOUNDS, model: Path = TINY) -> None:
    check_adapter(folder, model, bounds)


def test_an_adapter_of_the_model_is_taken(tmp_path: Path) -> None:
    files = check_adapter(write_adapter(tmp_path / "a"), TINY, BOUNDS)
    assert (files.rank, files.modules) == (4, tuple(sorted(MODULES)))


def test_the_digest_changes_with_the_weights_and_with_the_scaling(tmp_path: Path) -> None:
    folders = [
        write_adapter(tmp_path / "a", 1),
        write_adapter(tmp_path / "b", 2),
        write_adapter(tmp_path / "c", 1, lora_alpha=8),
    ]
    digests = [check_adapter(folder, TINY, BOUNDS).digest for folder in folders]
    assert len(set(digests)) == 3
    copied = shutil.copytree(folders[0], tmp_path / "copied")
    assert check_adapter(copied, TINY, BOUNDS).digest == digests[0]


@pytest.mark.parametrize(
    ("configuration", "why"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": 0}, r"rank \(r\)"),
        ({"r": True}, r"rank \(r\)"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"r": 9}, "its rank is 9, and max_rank is 8"),
        ({"target_modules": ".*proj"}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
    ],
)
def test_a_configuration_that_an_engine_does_not_follow_is_refused(
    configuration: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterMistake, match=why):
        check(write_adapter(tmp_path / "a", **configuration))


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterMistake, match="no folder"):
        check(tmp_path / "nowhere")
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterMistake, match="one file of safetensors, and has 0"):
        check(folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterMistake, match="no object"):
        check(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterMistake, match="no JSON"):
        check(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterMistake, match=r"no adapter_config\.json"):
        check(folder)


def test_an_adapter_with_new_tokens_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 1}))
    with pytest.raises(AdapterMistake, match="adds tokens"):
        check(folder)


@pytest.mark.parametrize("kept_bytes", [0, 4, 8, 100, -1])
def test_a_cut_file_of_weights_is_refused(kept_bytes: int, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(AdapterMistake, match="file of safetensors"):
        check(folder)


def test_tensors_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    shapes = adapter_shapes()
    down = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    outputs, inputs = shapes[down]
    without_b = {name: shape for name, shape in shapes.items() if name != down.replace("lora_A", "lora_B")}
    cases = {
        "demand": shapes | {down: (outputs, inputs + 1)},
        "one matrix of two": without_b,
        "no linear layer of the model": {name.replace("layers.2", "layers.3"): shape for name, shape in shapes.items()},
        "three_dimensions": shapes | {down: (1, outputs, inputs)},
        "not a matrix": shapes | {"base_model.model.lm_head.weight": (2, 2)},
        "no tensor": {},
    }
    for number, (why, wrong) in enumerate(cases.items()):
        folder = write_adapter(tmp_path / str(number))
        write_tensors(folder / "adapter_model.safetensors", wrong, 1)
        with pytest.raises(AdapterMistake, match=why.replace("three_dimensions", "with 3 dimensions")):
            check(folder)


@pytest.mark.parametrize("modules", [("k_proj",), ("q_proj",), ("q_proj", "k_proj"), ("up_proj",)])
def test_layers_that_are_computed_at_once_are_adapted_together(modules: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(AdapterMistake, match="an engine needs"):
        check(write_adapter(tmp_path / "a", modules=modules))


def test_modules_without_memory_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", modules=("q_proj", "v_proj", "o_proj"))
    check(folder, AdapterBounds(8, ("k_proj", "o_proj")))  # an engine keeps one memory for queries, keys and values
    with pytest.raises(AdapterMistake, match="it adapts o_proj, and target_modules are q_proj"):
        check(folder, AdapterBounds(8, ("q_proj",)))


def test_a_model_without_safetensors_has_no_shapes_to_compare(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(AdapterMistake, match="cannot be compared"):
        check(write_adapter(tmp_path / "a"), model=tmp_path / "model")


def test_a_pipe_in_the_place_of_the_weights_is_not_read(tmp_path: Path) -> None:
    """A load waited for it for ever, and every later one for that load."""
    folder = write_adapter(tmp_path / "a")
    (weights,) = folder.glob("*.safetensors")
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(AdapterMistake, match="is no file"):
        check(folder)


def test_an_engine_may_read_a_file_of_one_name_alone(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    one_name = AdapterBounds(8, weights="adapter_model.safetensors")
    check(folder, one_name)
    (folder / "adapter_model.safetensors").rename(folder / "weights.safetensors")
    check(folder)
    with pytest.raises(
        AdapterMistake, match=r"its weights are in weights\.safetensors, and this engine reads adapter_model"
    ):
        check(folder, one_name)


def test_layers_that_are_computed_at_once_count_as_one_only_where_the_engine_fuses_them(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", modules=("q_proj", "k_proj", "v_proj"))
    check(folder, AdapterBounds(8, ("q_proj",)))
    with pytest.raises(AdapterMistake, match="it adapts k_proj, v_proj, and target_modules are q_proj"):
        check(folder, AdapterBounds(8, ("q_proj",), fuses=False))
