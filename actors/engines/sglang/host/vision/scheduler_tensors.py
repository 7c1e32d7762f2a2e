"""Tensors of requests on their way to the schedulers, in shared memory that never outlives its host.

SGLang's tokenizer manager copies each tensor into shared memory in its event loop, and never frees the copy for a
request that left before it was sent. Here a thread makes the copy, in the format of SGLang's schedulers, and its maker
can discard it. The schedulers remove a name when they have received it; the names of a killed host are removed by their
prefix, which is in the list of `leftover_memory.py`. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch
from sglang.srt.managers.mm_utils import ShmPointerMMData

from actors.engines.host.torch_tensors import as_message
from actors.engines.leftover_memory import SHARED_MEMORY


class SchedulerTensors:
    """The tensors of one host, each under a name of its own that begins with `prefix`."""

    def __init__(self, prefix: str, folder: Path = SHARED_MEMORY) -> None:
        self._prefix = prefix
        self._folder = folder
        self._numbers = count(1)

    def share(self, tensor: torch.Tensor) -> ShmPointerMMData | torch.Tensor:
        """Return a copy of a tensor in shared memory; where that is full, the tensor itself, to be sent as it is."""
        data, path = as_message(tensor).data, self._folder / f"{self._prefix}{next(self._numbers)}"
        try:
            _write(path, data)
        except OSError:
            with suppress(OSError):
                path.unlink()
            return tensor
        return _pointer(path.name, tensor)

    def discard(self, tensors: Iterable[object]) -> None:
        """Remove the tensors that no scheduler has received; idempotent."""
        for tensor in tensors:
            if isinstance(tensor, ShmPointerMMData):
                with suppress(OSError):
                    (self._folder / tensor.shm_name).unlink()


def _write(path: Path, data: memoryview) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        written = 0
        # By writes, not by a mapping: a full file system is an error here, and no signal.
        while written < len(data):
            written += os.write(opened, data[written:])
    finally:
        os.close(opened)


def _pointer(name: str, tensor: torch.Tensor) -> ShmPointerMMData:
    """Return SGLang's stand-in for a tensor, without its constructor, which would make the copy."""
    pointer = ShmPointerMMData.__new__(ShmPointerMMData)
    vars(pointer).update(
        shm_name=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        precomputed_hash=None,
        tensor=None,
        _shm_handle=None,
        _materialization_error=None,
    )
    return pointer
