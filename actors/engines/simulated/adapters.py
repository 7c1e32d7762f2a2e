"""The LoRA adapters of a simulated engine: names with answers of their own; no file is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256

import trio
from attrs import define, field

from actors.engines.adapter_table import AdapterTable
from protocol.errors import Overloaded
from protocol.messages.adapters import Adapter, AdapterList, ListAdapters, LoadAdapter, UnloadAdapter
from protocol.messages.generation import Generate
from protocol.messages.kind import Message

DIGEST_LENGTH = 16


def adapter_of(name: str, folder: str) -> Adapter:
    """Return an adapter whose digest is that of its folder's path."""
    return Adapter(name, sha256(folder.encode()).hexdigest()[:DIGEST_LENGTH])


@define(eq=False)
class SimulatedAdapters:
    """The adapters of one engine, at most `table.loaded_max`; with 0 it has none."""

    table: AdapterTable
    _used: dict[str, Adapter] = field(factory=dict)  # by the id of the request

    @classmethod
    def of(cls, loaded_max: int, folders: Mapping[str, str]) -> SimulatedAdapters:
        """Return the adapters of an engine that has just loaded some folders, by name."""
        table = AdapterTable(loaded_max)
        for name, folder in folders.items():
            table.add(adapter_of(name, folder), folder)
        return cls(table)

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Message], Awaitable[Message]]]:
        """The handlers of the operations that the engine carries out."""
        listing: dict[type[Message], Callable[[Message], Awaitable[Message]]] = {ListAdapters: self._list}
        return {LoadAdapter: self._load, UnloadAdapter: self._unload, **listing} if self.table.loaded_max else listing

    def take(self, request: Generate) -> None:
        """Count a request, if it uses an adapter; raises `AdapterNotLoaded` unless that is loaded."""
        if request.adapter is not None:
            self.table.take(request.adapter)
            self._used[request.id] = request.adapter

    def release(self, request_id: str) -> None:
        """Count a request no more."""
        if (adapter := self._used.pop(request_id, None)) is not None:
            self.table.release(adapter)

    async def _list(self, _: Message) -> AdapterList:
        await trio.lowlevel.checkpoint()
        return self.table.listed()

    async def _load(self, request: Message) -> AdapterList:
        await trio.lowlevel.checkpoint()
        assert isinstance(request, LoadAdapter)
        self.table.check_new(request.lora_name)
        self.table.add(adapter_of(request.lora_name, request.lora_path), request.lora_path)
        return self.table.listed()

    async def _unload(self, request: Message) -> AdapterList:
        await trio.lowlevel.checkpoint()
        assert isinstance(request, UnloadAdapter)
        self.table.check_wait(request.wait_s)
        name, unused = request.lora_name, trio.Event()
        with self.table.leaving(name, unused.set) as is_unused:
            if not is_unused:
                with trio.move_on_after(request.wait_s):
                    await unused.wait()
                if not unused.is_set():
                    raise Overloaded(self.table.still_used(name, request.wait_s))
            self.table.remove(name)
        return self.table.listed()
