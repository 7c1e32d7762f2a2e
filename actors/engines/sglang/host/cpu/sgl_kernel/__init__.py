"""Stands in for SGLang's compiled kernels where there are none: any name can be imported, none can be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} was called, and there is no CPU build of it")

    return missing
