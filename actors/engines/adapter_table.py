"""The table of one engine's LoRA adapters: which are loaded, and how many requests use each.

SGLang loads an adapter again when a request names an unloaded one, so this table alone decides which names a request
may have. It does nothing else: an engine changes it once it has loaded or unloaded the adapter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from attrs import define, field

from protocol.errors import AdapterNotLoaded, BadRequest, Overloaded
from protocol.messages.adapters import UNLOAD_WAIT_MAX_S, Adapter, AdapterList, LoadedAdapter, name_mistake


def _ignore() -> None:
    """Do nothing at the end of the last request."""


@define(eq=False)
class _Entry:
    """One loaded adapter."""

    adapter: Adapter
    folder: str
    rank: int
    requests: int = 0
    withdrawn: bool = False  # whether it was to be unloaded, which has failed
    leaves: bool = False  # whether it is about to be unloaded, and takes no new request
    on_unused: Callable[[], None] = _ignore


@define(eq=False)
class AdapterTable:
    """The adapters of one engine, at most `loaded_max`."""

    loaded_max: int
    _entries: dict[str, _Entry] = field(factory=dict)  # by name

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that a request may name, by name."""
        return tuple(entry.adapter for _, entry in sorted(self._entries.items()) if not entry.withdrawn)

    @property
    def folders(self) -> dict[str, str]:
        """The folders of the loaded adapters by name."""
        return {name: entry.folder for name, entry in self._entries.items()}

    def listed(self) -> AdapterList:
        """Return the loaded adapters for an operator."""
        return AdapterList(
            tuple(
                LoadedAdapter(name, entry.adapter.digest, entry.folder, entry.rank, entry.requests)
                for name, entry in sorted(self._entries.items())
            ),
            self.loaded_max,
        )

    # Loading and unloading ---------------------------------------------------------------

    def check_new(self, name: str) -> None:
        """Raise `BadRequest` if an adapter of this name cannot be loaded."""
        if (why := name_mistake(name)) is not None:
            raise BadRequest(f"the name of an adapter {why}", param="lora_name")
        if name in self._entries:
            raise BadRequest(
                f"adapter {name} is loaded already, from {self._entries[name].folder}: unload it first",
                param="lora_name",
            )
        if len(self._entries) >= self.loaded_max:
            raise BadRequest(
                f"{len(self._entries)} adapters are loaded, and loaded_max is {self.loaded_max}: unload one first",
                param="lora_name",
            )

    def add(self, adapter: Adapter, folder: str, rank: int = 0) -> None:
        """Add an adapter that has been loaded."""
        self._entries[adapter.name] = _Entry(adapter, folder, rank)

    def check_wait(self, wait_s: float) -> None:
        """Raise `BadRequest` for a wait that is too long or none."""
        if not 0 <= wait_s <= UNLOAD_WAIT_MAX_S:
            raise BadRequest(f"wait_s must be from 0 to {UNLOAD_WAIT_MAX_S:g}, got {wait_s}", param="wait_s")

    @contextmanager
    def leaving(self, name: str, on_unused: Callable[[], None]) -> Iterator[bool]:
        """Give an adapter no further requests while the body runs; yields whether no request uses it.

        If some do, `on_unused` is called when the last one has ended. The body unloads the adapter and calls `remove`,
        else requests may name it again. Raises `AdapterNotLoaded`, or `Overloaded` if it leaves already.
        """
        entry = self._entry(name)
        if entry.leaves:
            raise Overloaded(f"adapter {name} is being unloaded already")
        entry.leaves, entry.on_unused = True, on_unused
        try:
            yield not entry.requests
        finally:
            entry.leaves, entry.on_unused = False, _ignore

    def withdraw(self, name: str) -> None:
        """Let no request name an adapter any more, also if it cannot be unloaded."""
        self._entry(name).withdrawn = True

    def remove(self, name: str) -> None:
        """Remove an adapter that has been unloaded."""
        del self._entries[name]

    # Requests ----------------------------------------------------------------------------

    def take(self, adapter: Adapter) -> None:
        """Count a request that uses an adapter; raises `AdapterNotLoaded` unless it is loaded, with the same files."""
        entry = self._entry(adapter.name)
        if entry.leaves or entry.withdrawn:
            raise AdapterNotLoaded(f"adapter {adapter.name} is being unloaded", param="model")
        if entry.adapter != adapter:
            raise AdapterNotLoaded(f"adapter {adapter.name} has other files in this engine", param="model")
        entry.requests += 1

    def release(self, adapter: Adapter) -> None:
        """Count a request no more."""
        entry = self._entries.get(adapter.name)
        if entry is None or not entry.requests:
            return
        entry.requests -= 1
        if not entry.requests:
            entry.on_unused()

    def still_used(self, name: str, after_s: float) -> str:
        """Return why an adapter has not been unloaded."""
        return f"{self._entry(name).requests} requests still use adapter {name} after {after_s:g} s: it stays loaded"

    def _entry(self, name: str) -> _Entry:
        if (entry := self._entries.get(name)) is None:
            raise AdapterNotLoaded(not_loaded(name, self._entries), param="model")
        return entry


def not_loaded(name: str, loaded: Iterable[str]) -> str:
    """Return why a request for an adapter is refused that is not among the `loaded` ones."""
    return f"adapter {name!r:.80} is not loaded; there is {', '.join(sorted(loaded)) or 'none'}"
