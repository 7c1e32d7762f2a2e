"""The tensors of messages as torch's, in the processes of engines that have torch."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from protocol.tensors import Dtype, Tensor

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing is written into it

DTYPES = {
    Dtype.BOOL: torch.bool,
    Dtype.UINT8: torch.uint8,
    Dtype.INT32: torch.int32,
    Dtype.INT64: torch.int64,
    Dtype.FLOAT16: torch.float16,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT32: torch.float32,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_torch(tensor: Tensor) -> torch.Tensor:
    """Return a tensor of a message as torch's, over the same memory, which is there as long as the tensor.

    The memory of a request is unmapped when its stream ends, and a thread may still compute with it: NumPy's array
    keeps it, where `torch.frombuffer` would keep nothing but an address.
    """
    array = np.frombuffer(tensor.data, np.uint8)
    return torch.from_numpy(array).view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def as_message(tensor: torch.Tensor) -> Tensor:
    """Return a tensor of torch as one of a message; it is copied only if it is not dense, or not in host memory."""
    dense = tensor.detach().cpu().contiguous()
    data = dense.view(torch.uint8).reshape(-1).numpy().data
    return Tensor(NAMES[dense.dtype], tuple(dense.shape), data)
