"""The folder of a model: its configuration, and the headers of its weights; no weights are read."""

from __future__ import annotations

import json
from pathlib import Path

from protocol.errors import BadRequest
from protocol.model_weights import CONFIGURATION, Checkpoint, Form, forms
from protocol.safetensors import SIZE_BYTES, Header, header_size, read_header

INDEX = "model.safetensors.index.json"
CONFIGURATION_BYTES_MAX, INDEX_BYTES_MAX = 16 * 1024 * 1024, 64 * 1024 * 1024


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return what a folder says of a model; of its weights only the headers are read.

    Raises `BadRequest` for a folder that cannot be read, and for one without safetensors files.
    """
    if not folder.is_absolute():
        raise BadRequest(f"{folder} is no absolute path on the engine's node", param="folder")
    try:
        if not folder.is_dir():
            raise BadRequest(f"there is no folder {folder} on the engine's node", param="folder")
        config = _object(folder / CONFIGURATION, CONFIGURATION_BYTES_MAX)
        index: dict[str, Form] = {}
        for file in _files(folder):
            for name, form in forms(_read(file)).items():
                if name in index:
                    raise BadRequest(f"two files in {folder} have a tensor {name[:128]}", param="folder")
                index[name] = form
    except OSError as error:
        raise BadRequest(f"{folder} cannot be read: {error.strerror or error}", param="folder") from None
    if not index:
        raise BadRequest(f"{folder} has no safetensors files with weights", param="folder")
    return Checkpoint(config, index)


def _files(folder: Path) -> list[Path]:
    """Return the files of the weights: those that the folder's own index names, if it has one."""
    if not (folder / INDEX).exists():
        return sorted(folder.glob("*.safetensors"))
    files = _object(folder / INDEX, INDEX_BYTES_MAX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) and "/" not in name for name in files.values()):
        raise BadRequest(f"{folder / INDEX} has no weight_map of file names", param="folder")
    return [folder / name for name in sorted(set(files.values()))]


def _object(file: Path, bytes_max: int) -> dict[str, object]:
    """Return the JSON object in a file."""
    if file.stat().st_size > bytes_max:
        raise BadRequest(f"{file} has more than {bytes_max} bytes", param="folder")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise BadRequest(f"{file} is no JSON", param="folder") from None
    if not isinstance(value, dict):
        raise BadRequest(f"{file} is no JSON object", param="folder")
    return value


def _read(file: Path) -> Header:
    """Return the header of a file."""
    with file.open("rb") as opened:
        try:
            file_bytes = file.stat().st_size
            size = header_size(opened.read(SIZE_BYTES), file_bytes)
            return read_header(opened.read(size), file_bytes)
        except BadRequest as error:
            raise BadRequest(f"{file}: {error.detail}", param="folder") from None
