"""Memory whose end can be seen, so that a test notices who still refers to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from attrs import evolve

from protocol.tensors import Tensor


class Watched(bytearray):
    """Bytes that weak references may refer to."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def watched(tensor: Tensor, alive: WeakSet[Watched]) -> Tensor:
    """Return an equal tensor, whose memory is in `alive` for as long as anything refers to it."""
    alive.add(memory := Watched(tensor.data))
    return evolve(tensor, data=memoryview(memory))


@contextmanager
def uncollected() -> Iterator[None]:
    """Free nothing by the garbage collector while the body runs, so that references in a circle are noticed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
