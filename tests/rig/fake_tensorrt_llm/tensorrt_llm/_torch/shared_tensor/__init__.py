"""Tensors that processes share, as handles; here within one process, and each handle can be opened once."""

import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy

REBUILD_CPU = 2
COPY_S = 0.0002
_shared: dict[int, torch.Tensor] = {}
_numbers = count(1)


class SharedTensorContainer:
    def __init__(self, method_key: int, tensor_handle: dict[str, Any]) -> None:
        self.method_key = method_key
        self.tensor_handle = tensor_handle

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, local: bool = False) -> "SharedTensorContainer":
        del local
        number = next(_numbers)
        _shared[number] = tensor.clone()
        return cls(REBUILD_CPU, {"tensor_size": [*tensor.shape], "storage_handle": number})

    @classmethod
    def from_dict(cls, tensor_info: Mapping[str, Any]) -> "SharedTensorContainer":
        handle = {name: value for name, value in tensor_info.items() if name != "method_key"}
        return cls(tensor_info["method_key"], handle)

    def dump_to_dict(self) -> dict[str, Any]:
        strategy = get_sharing_strategy()  # type: ignore[no-untyped-call]
        set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        time.sleep(COPY_S)
        if get_sharing_strategy() != "file_system":  # type: ignore[no-untyped-call]
            raise ValueError("Failed to serialize tensor information: a bytes-like object is required")
        set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
        return {"method_key": self.method_key, **self.tensor_handle}

    def get_local_view(self) -> torch.Tensor:
        """Open the tensor; raises `KeyError` for a handle that has been opened, whose memory the real one has freed."""
        return _shared.pop(self.tensor_handle["storage_handle"])


def held() -> int:
    """Return the number of handles that nobody has opened."""
    return len(_shared)
