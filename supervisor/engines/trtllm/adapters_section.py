"""`[engine.NAME.adapters]` of a TensorRT-LLM engine, and the checks of it beside the engine's other keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import frozen

from actors.engines.adapter_files import ALL, AdapterBounds
from actors.engines.trtllm.adapter_arguments import adapter_bounds
from actors.engines.trtllm.signatures import LORA_MODULES
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.engines.file_adapters import FileAdapters

PAIR = "an engine of a pair takes no adapters: TensorRT-LLM does not load that of a request whose KV cache it fetches"
RANKS = "an engine with several ranks takes no adapters: with attention parallelism TensorRT-LLM calls them untested"


@frozen(kw_only=True)
class TrtllmAdapters(FileAdapters):
    """`[engine.NAME.adapters]`: the LoRA adapters of a TensorRT-LLM engine."""

    @property
    def bounds(self) -> AdapterBounds:
        """The bounds on its adapters: TensorRT-LLM has places for whole groups of layers."""
        return adapter_bounds(self.max_rank, self.target_modules)

    def mistakes(self, path: str) -> Iterator[Mistake]:
        """Yield the mistakes in this table at `path`."""
        yield from super().mistakes(path)
        if unknown := sorted({*self.target_modules} - {ALL, *LORA_MODULES}):
            names = ", ".join(LORA_MODULES)
            yield Mistake(f"{path}.target_modules", f"names {', '.join(unknown)}; expected {ALL} or some of {names}")


def mistakes(
    own: TrtllmAdapters | None, settings: Iterable[str], path: str, *, in_pair: bool, ranks: int
) -> Iterator[Mistake]:
    """Yield the mistakes of an engine's table at `path`.adapters, and of the settings that depend on it."""
    if own is None:
        for name in settings:
            if name.startswith("lora_config."):
                place = join(f"{path}.settings", segment(name))
                yield Mistake(place, "means nothing without [engine.NAME.adapters]")
        return
    if in_pair:
        yield Mistake(f"{path}.adapters", PAIR)
    if ranks > 1:
        yield Mistake(f"{path}.adapters", RANKS)
    yield from own.mistakes(f"{path}.adapters")
