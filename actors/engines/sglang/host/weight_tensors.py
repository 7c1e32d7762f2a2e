"""Tensors of a safetensors file as SGLang's schedulers take them: in one piece of shared memory."""

from __future__ import annotations

import torch
from sglang.srt.server_args import ServerArgs
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from protocol.safetensors import Header
from protocol.tensors import Tensor
from protocol.weights_record import LAYOUT_MARK

ALIGNED_BYTES = 64  # of a tensor's place: torch reads no number at a place that its size does not divide

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The dtypes of torch by their names in safetensors files."""


def bucket(file: Tensor, header: Header) -> dict[str, object]:
    """Return the tensors of a file in one piece of shared memory, as SGLang takes them, each in an aligned place."""
    places: list[FlattenedTensorMetadata] = []
    size = 0
    for name, placed in header.tensors.items():
        begin = -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
        size = begin + placed.end - placed.begin
        shape, dtype = torch.Size(placed.shape), DTYPES[placed.dtype]
        places.append(FlattenedTensorMetadata(name, shape, dtype, begin, size, placed.end - placed.begin))
    memory = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    buffer, data = memoryview(memory.numpy()), file.data[header.data_at :]
    for place, placed in zip(places, header.tensors.values(), strict=True):
        buffer[place.start_idx : place.end_idx] = data[placed.begin : placed.end]
    return {"flattened_tensor": memory, "metadata": places}


def size_bytes(shape: tuple[int, ...], dtype: torch.dtype | None) -> int:
    """Return the bytes of a tensor."""
    assert dtype is not None
    return torch.Size(shape).numel() * dtype.itemsize


def layout(arguments: ServerArgs) -> str:
    """Return what a checksum depends on beside the weights: how ranks share them, and their quantisation."""
    sizes = (("tp", arguments.tp_size), ("pp", arguments.pp_size), ("ep", arguments.ep_size))
    parts = [f"{name}{size}" for name, size in sizes if size > 1] + [arguments.quantization or ""]
    text = "-".join(part for part in parts if part)
    return f"{text}{LAYOUT_MARK}" if text else ""
