"""Patches by which SGLang 0.5.23 runs on a CPU; README.md has the reason for each, and when it can be removed."""

from __future__ import annotations

import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

_OPERATORS = {
    "torchvision": (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ),
    # Left out on purpose: those that SGLang looks for with hasattr() to choose a path for AMX processors.
    "sgl_kernel": tuple(
        f"{name}(Tensor x) -> Tensor"
        for name in (
            "fused_sigmoid_mul_cpu",
            "fused_qk_gemma_rmsnorm_cpu",
            "fused_qk_gemma_rmsnorm_with_gate_cpu",
            "fused_qkvzba_split_reshape_cat_contiguous_cpu",
            "fused_moe_router_cpu",
            "rmsnorm_cpu",
            "fused_dual_residual_rmsnorm_cpu",
        )
    ),
}
_kept: list[torch.library.Library] = []  # an operator lives as long as the library object that defined it


def prepare() -> None:
    """Register the operators that must exist before SGLang and torchvision are imported; idempotent."""
    if _kept:
        return
    _load_torchvision()
    for namespace, schemas in _OPERATORS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            if not hasattr(getattr(torch.ops, namespace), schema.split("(")[0]):
                library.define(schema)
        _kept.append(library)


def _load_torchvision() -> None:
    """Load torchvision's own operators where its build fits torch's.

    Its import loads them in any case, and an operator that is defined twice ends the process.
    """
    spec = find_spec("torchvision")
    for library in Path(spec.origin).parent.glob("_C*.so") if spec is not None else ():
        with suppress(OSError):  # it needs CUDA's libraries, which a CPU's torch lacks
            torch.ops.load_library(library)


def activate() -> None:
    """Give SGLang ordinary memory in place of pinned memory, and attention for the new tokens alone.

    It calls this in each of its processes.
    """
    if torch.cuda.is_available() or getattr(torch, "_espalier_cpu", False):
        return
    torch._espalier_cpu = True
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "rand", "randn"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.cuda.Event = torch.cpu.Event = _Event
    torch.cpu.is_current_stream_capturing = lambda: False  # asked by the recorder of experts in each step
    torch.cpu.empty_cache = lambda: None  # called by it before its first dump
    _disable_host_indices()
    _attend_new()


class _Event:
    """Stand-in for torch.cuda.Event: on a CPU every operation is done when it returns."""

    def __init__(self, *_, **__):
        self._at_s = 0.0

    def record(self, *_):
        self._at_s = time.perf_counter()

    def wait(self, *_):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other._at_s - self._at_s) * 1000


def _disable_host_indices():
    """Send the cached prefix of a prompt like the rest: SGLang's path through host memory needs a GPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def without_host_indices(kv_class, *_, **__):
        if getattr(kv_class, "supports_host_tensor_indices", False):
            kv_class.supports_host_tensor_indices = False
        return kv_class

    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", without_host_indices, HookType.AFTER)


def _attend_new():
    from espalier_cpu_attention import EXTEND, attend_new
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(EXTEND, attend_new, HookType.AROUND)


def _unpinned(make):
    from torch.jit._builtins import _find_builtin, _register_builtin

    def unpinned(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    unpinned.__name__ = make.__name__
    if (builtin := _find_builtin(make)) is not None:
        _register_builtin(unpinned, builtin)  # torch.jit.script must still see the operator behind the name
    return unpinned
