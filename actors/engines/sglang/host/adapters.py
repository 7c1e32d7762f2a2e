"""SGLang's side of an engine's LoRA adapters: how they are loaded and unloaded. Written for SGLang 0.5.23.

SGLang's own registry is not asked which adapters there are, since it loads an unloaded one again when a request names
it.
"""

from __future__ import annotations

import asyncio

from attrs import frozen
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from protocol.errors import EngineRefused, Overloaded, Unsupported

RELEASED_WITHIN_S = 10.0
"""The time in which SGLang, too, must have noticed the end of an adapter's last request."""


@frozen
class SglangAdapterLoader:
    """The adapters inside SGLang; implements `actors.engines.host.adapters.AdapterLoader`."""

    manager: TokenizerManager

    def check_changeable(self) -> None:
        """Raise `Unsupported` for an engine with several ranks."""
        if self.manager.server_args.dp_size > 1:
            why = "an engine with several ranks loads adapters only at its start, by adapters.load, and unloads none"
            raise Unsupported(why)

    async def load(self, name: str, folder: str) -> None:
        """Have SGLang load the adapter in a folder."""
        loaded = await self.manager.load_lora_adapter(
            LoadLoRAAdapterReqInput(lora_name=name, lora_path=folder, pinned=False)
        )
        if not loaded.success:
            raise EngineRefused(f"SGLang did not load the adapter: {loaded.error_message}", param="lora_path")

    async def unload(self, name: str) -> None:
        """Have SGLang unload an adapter; raises `Overloaded` if that takes too long."""
        self.manager.lora_ref_cache.pop(name, None)  # from which SGLang would load it again
        # Never cancelled: the scheduler's answer would be taken for that to another question.
        unloading = asyncio.ensure_future(self.manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name)))
        await asyncio.wait({unloading}, timeout=RELEASED_WITHIN_S)
        if not unloading.done():
            raise Overloaded(f"SGLang has not released adapter {name} after {RELEASED_WITHIN_S:g} s: unload it again")
        result = unloading.result()
        if not result.success:
            raise EngineRefused(f"SGLang did not unload the adapter: {result.error_message}")
