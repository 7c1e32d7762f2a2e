"""The LoRA adapters of one SGLang engine: loaded, unloaded, and counted for the requests that use them.

SGLang's own registry is not asked which adapters there are, since it loads an unloaded one again when a request names
it. An adapter leaves the table of this host first, then SGLang. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attrs import define
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.adapter_files import AdapterBounds, AdapterFiles, AdapterMistake, check_adapter
from actors.engines.adapter_table import AdapterTable
from actors.engines.host.handler import Handler
from actors.engines.sglang.spec import AdapterLimits
from protocol.errors import BadRequest, EngineRefused, Overloaded, Unsupported
from protocol.messages.adapters import Adapter, AdapterList, ListAdapters, LoadAdapter, UnloadAdapter
from protocol.messages.kind import Message

RELEASED_WITHIN_S = 10.0
"""The time in which SGLang, too, must have noticed the end of an adapter's last request."""


def checked(folder: str, model: str, limits: AdapterLimits) -> AdapterFiles:
    """Return the files of an adapter; raises `AdapterMistake` if an engine of this model cannot take them."""
    return check_adapter(Path(folder), Path(model), AdapterBounds(limits.rank_max, limits.modules))


def first_adapters(limits: AdapterLimits | None, model: str) -> AdapterTable:
    """Return the table of an engine before it loads its first adapters; a dispensable one with wrong files is left out.

    Raises `AdapterMistake` for the wrong files of any other.
    """
    if limits is None:
        return AdapterTable(0)
    table = AdapterTable(limits.loaded_max)
    for name, folder in limits.folders.items():
        try:
            files = checked(folder, model, limits)
        except (AdapterMistake, OSError) as error:
            why = f"adapter {name} in {folder}: {error}"
            if name not in limits.dispensable:
                raise AdapterMistake(why) from None
            sys.stderr.write(f"{why}\n")
            continue
        table.add(Adapter(name, files.digest), folder, files.rank)
    return table


@define(eq=False)
class Adapters:
    """The adapters of one engine, and the operations with them; without `limits` it has none."""

    manager: TokenizerManager
    limits: AdapterLimits | None
    table: AdapterTable
    _busy: bool = False  # whether an adapter is being loaded or unloaded

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """The handlers of the operations that this engine carries out."""
        listing: dict[type[Message], Handler] = {ListAdapters: self._list}
        return listing if self.limits is None else {LoadAdapter: self._load, UnloadAdapter: self._unload, **listing}

    async def _list(self, _: Message) -> AdapterList:
        return self.table.listed()

    async def _load(self, request: Message) -> AdapterList:
        assert isinstance(request, LoadAdapter)
        assert self.limits is not None  # else it does not list the operation
        if self.manager.server_args.dp_size > 1:
            raise Unsupported("an engine with several ranks loads adapters only at its start: name it in adapters.load")
        with self._exclusive():
            name, folder = request.lora_name, request.lora_path
            self.table.check_new(name)
            if not Path(folder).is_absolute():
                raise BadRequest(f"the folder of an adapter is given in full, got {folder!r:.200}", param="lora_path")
            try:
                files = await asyncio.to_thread(checked, folder, self.manager.server_args.model_path, self.limits)
            except (AdapterMistake, OSError) as error:
                raise BadRequest(f"{folder} is no adapter for this engine: {error}", param="lora_path") from error
            loaded = await self.manager.load_lora_adapter(
                LoadLoRAAdapterReqInput(lora_name=name, lora_path=folder, pinned=False)
            )
            if not loaded.success:
                raise EngineRefused(f"SGLang did not load the adapter: {loaded.error_message}", param="lora_path")
            self.table.add(Adapter(name, files.digest), folder, files.rank)
            return self.table.listed()

    async def _unload(self, request: Message) -> AdapterList:
        assert isinstance(request, UnloadAdapter)
        if self.manager.server_args.dp_size > 1:
            raise Unsupported("an engine with several ranks unloads no adapter")
        self.table.check_wait(request.wait_s)
        with self._exclusive():
            name, unused = request.lora_name, asyncio.Event()
            with self.table.leaving(name, unused.set) as is_unused:
                if not is_unused:
                    try:
                        async with asyncio.timeout(request.wait_s):
                            await unused.wait()
                    except TimeoutError:
                        raise Overloaded(self.table.still_used(name, request.wait_s)) from None
                self.table.withdraw(name)
                await self._unload_from_sglang(name)
                self.table.remove(name)
            return self.table.listed()

    async def _unload_from_sglang(self, name: str) -> None:
        self.manager.lora_ref_cache.pop(name, None)  # from which SGLang would load it again
        # Never cancelled: the scheduler's answer would be taken for that to another question.
        unloading = asyncio.ensure_future(self.manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name)))
        await asyncio.wait({unloading}, timeout=RELEASED_WITHIN_S)
        if not unloading.done():
            raise Overloaded(f"SGLang has not released adapter {name} after {RELEASED_WITHIN_S:g} s: unload it again")
        result = unloading.result()
        if not result.success:
            raise EngineRefused(f"SGLang did not unload the adapter: {result.error_message}")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Refuse a second change instead of letting it wait: it would wait longer than its asker."""
        if self._busy:
            raise Overloaded("another adapter of this engine is being loaded or unloaded")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
