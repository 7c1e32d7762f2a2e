"""`[engine.NAME.adapters]` of an SGLang engine, and the checks of it beside SGLang's own settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import evolve, frozen

from actors.engines.adapter_files import AdapterLimits
from actors.engines.sglang.spec import Setting
from protocol.strict.mistakes import Mistake
from supervisor.config.adapters import AdapterCount
from supervisor.engines.file_adapters import FileAdapters

BACKENDS = ("triton", "csgmv", "torch_native", "triton_v2")
SETTINGS = (
    "lora_backend",
    "lora_eviction_policy",
    "lora_drain_wait_threshold",
    "lora_strict_loading",
    "lora_use_virtual_experts",
    "max_lora_chunk_size",
    "enable_lora_overlap_loading",
    "experts_shared_outer_loras",
)
"""SGLang's other arguments about adapters, which mean nothing without the table."""
SAFE_FORMATS = ("auto", "safetensors")
"""The formats of weights in which an adapter is read from safetensors."""


@frozen(kw_only=True)
class SglangAdapters(FileAdapters):
    """`[engine.NAME.adapters]`: the LoRA adapters of an SGLang engine."""

    active_max: AdapterCount = 7  # different adapters of one engine step; requests for more wait

    def limits(self, folder: Path) -> AdapterLimits:
        """Return the limits on the engine's adapters, and the folders of the first ones, from the file's `folder`."""
        return evolve(super().limits(folder), active_max=self.active_max)


def mistakes(
    own: SglangAdapters | None, settings: Mapping[str, Setting], device: str | None, path: str
) -> Iterator[Mistake]:
    """Yield the mistakes of an engine's table at `path`.adapters, and of the settings that depend on it."""
    if own is None:
        for name in SETTINGS:
            if name in settings:
                yield Mistake(f"{path}.settings.{name}", "means nothing without [engine.NAME.adapters]")
        return
    yield from own.mistakes(f"{path}.adapters")
    if device == "cpu" and settings.get("lora_backend", "torch_native") != "torch_native":
        yield Mistake(f"{path}.settings.lora_backend", "must be torch_native on a CPU: the others need a GPU")
    if settings.get("load_format", "auto") not in SAFE_FORMATS:
        yield Mistake(
            f"{path}.settings.load_format",
            f"must be {' or '.join(SAFE_FORMATS)} beside adapters, which are read in the same format, and only from"
            " safetensors",
        )
