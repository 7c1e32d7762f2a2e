"""The LoRA adapters of one engine in its host: loaded, unloaded, and counted for the requests that use them.

An engine's own registry is not asked which adapters there are: an adapter is in the table of this host while requests
may name it. It is added once the engine has it, and leaves before the engine gives it up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from attrs import define

from actors.engines.adapter_files import AdapterFiles, AdapterLimits, AdapterMistake, check_adapter
from actors.engines.adapter_table import AdapterTable
from actors.engines.host.handler import Handler
from protocol.errors import BadRequest, Overloaded
from protocol.messages.adapters import Adapter, AdapterList, ListAdapters, LoadAdapter, UnloadAdapter
from protocol.messages.kind import Message


class AdapterLoader(Protocol):
    """The way of a kind to load and unload adapters; each method raises a `RequestError` if the engine refuses."""

    def check_changeable(self) -> None:
        """Raise `Unsupported` if its adapters are those of its start."""

    async def load(self, name: str, folder: str) -> None:
        """Have the engine take the adapter in a folder."""

    async def unload(self, name: str) -> None:
        """Have the engine give up an adapter that no request uses."""


def first_adapters(limits: AdapterLimits | None, model: str) -> AdapterTable:
    """Return the table of an engine before it loads its first adapters; a dispensable one with wrong files is left out.

    Raises `AdapterMistake` for the wrong files of any other.
    """
    if limits is None:
        return AdapterTable(0)
    table = AdapterTable(limits.loaded_max)
    for name, folder in limits.folders.items():
        try:
            files = _checked(folder, model, limits)
        except (AdapterMistake, OSError) as error:
            why = f"adapter {name} in {folder}: {error}"
            if name not in limits.dispensable:
                raise AdapterMistake(why) from None
            sys.stderr.write(f"{why}\n")
            continue
        table.add(Adapter(name, files.digest), folder, files.rank)
    return table


def _checked(folder: str, model: str, limits: AdapterLimits) -> AdapterFiles:
    return check_adapter(Path(folder), Path(model), limits.bounds)


@define(eq=False)
class Adapters:
    """The adapters of one engine, and the operations with them; without `limits` it has none."""

    loader: AdapterLoader
    model: str  # the folder of the engine's model
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
        self.loader.check_changeable()
        with self._exclusive():
            name, folder = request.lora_name, request.lora_path
            self.table.check_new(name)
            if not Path(folder).is_absolute():
                raise BadRequest(f"the folder of an adapter is given in full, got {folder!r:.200}", param="lora_path")
            try:
                files = await asyncio.to_thread(_checked, folder, self.model, self.limits)
            except (AdapterMistake, OSError) as error:
                raise BadRequest(f"{folder} is no adapter for this engine: {error}", param="lora_path") from error
            await self.loader.load(name, folder)
            self.table.add(Adapter(name, files.digest), folder, files.rank)
            return self.table.listed()

    async def _unload(self, request: Message) -> AdapterList:
        assert isinstance(request, UnloadAdapter)
        self.loader.check_changeable()
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
                await self.loader.unload(name)
                self.table.remove(name)
            return self.table.listed()

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
