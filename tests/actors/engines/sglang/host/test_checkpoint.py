"""The folder of a model as a host reads it: its index, and what makes a folder unusable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.engines.sglang.host.checkpoint import INDEX, read_checkpoint
from protocol.errors import BadRequest
from protocol.model_weights import Form
from tests.contracts.weights import file_of

PART = file_of({"a": ("F32", [2], bytes(8))})
OTHER = file_of({"b": ("BF16", [1, 2], bytes(4))})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["Oak"]}')
    (tmp_path / "model-1.safetensors").write_bytes(PART)
    (tmp_path / "model-2.safetensors").write_bytes(OTHER)
    return tmp_path


def test_an_index_has_the_tensors_of_all_files(folder: Path) -> None:
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == {"architectures": ["Oak"]}
    assert checkpoint.index == {"a": Form("F32", (2,)), "b": Form("BF16", (1, 2))}


def test_a_folder_with_an_index_of_its_own_has_the_files_that_it_names(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"b": "model-2.safetensors"}}))
    assert read_checkpoint(folder).index.keys() == {"b"}
    (folder / INDEX).write_text(json.dumps({"weight_map": {"b": "model-3.safetensors"}}))
    with pytest.raises(BadRequest, match="cannot be read"):
        read_checkpoint(folder)
    for wrong in ({}, {"weight_map": {"b": "../model-2.safetensors"}}, {"weight_map": {"b": 1}}):
        (folder / INDEX).write_text(json.dumps(wrong))
        with pytest.raises(BadRequest, match="no weight_map of file names"):
            read_checkpoint(folder)


def test_each_fault_of_a_folder_is_named(folder: Path, tmp_path: Path) -> None:
    def check(why: str) -> None:
        with pytest.raises(BadRequest, match=why):
            read_checkpoint(folder)

    with pytest.raises(BadRequest, match="no absolute path"):
        read_checkpoint(Path("models/tiny"))
    for missing in (tmp_path / "gone", tmp_path / ("x" * 5000), folder / "config.json", Path("/a\0b")):
        with pytest.raises(BadRequest, match=r"no folder|cannot be read"):
            read_checkpoint(missing)
    (folder / "model-2.safetensors").write_bytes(PART)
    check("two files in .* have a tensor a")
    (folder / "model-2.safetensors").write_bytes(OTHER[:-1])
    check(r"model-2\.safetensors: the tensors of the file end at")
    (folder / "config.json").write_text("[1]")
    check("is no JSON object")
    (folder / "config.json").write_text("{")
    check("is no JSON")
    (folder / "config.json").unlink()
    check("cannot be read: No such file")
    (folder / "config.json").write_text("{}")
    for name in ("model-1", "model-2"):
        (folder / f"{name}.safetensors").unlink()
    check("no safetensors files")
