"""The table of an engine that reads the files of its LoRA adapters, and its adapters from one life to the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from attrs import evolve, frozen

from actors.engines.adapter_files import ALL, AdapterBounds, AdapterLimits, AdapterMistake, check_adapter
from actors.engines.hosted_engine import HostedEngine
from actors.engines.port import Engine
from protocol.strict.checks import Holds, Within
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.adapters import AdaptersSection


@frozen(kw_only=True)
class FileAdapters(AdaptersSection):
    """`[engine.NAME.adapters]` of an engine that reads the files of its adapters."""

    max_rank: Annotated[int, Within(at_least=1, at_most=1024)]  # largest rank of an adapter, for which memory is kept
    # layers that adapters may change, by their names in the model, such as `q_proj`; `all` for every linear layer
    target_modules: Annotated[tuple[str, ...], Holds(1)] = (ALL,)

    @property
    def bounds(self) -> AdapterBounds:
        """The adapters that the engine takes."""
        return AdapterBounds(self.max_rank, self.target_modules)

    def limits(self, folder: Path) -> AdapterLimits:
        """Return the limits on the engine's adapters, and the folders of the first ones, from the file's `folder`."""
        return AdapterLimits(bounds=self.bounds, loaded_max=self.loaded_max, folders=self.folders(folder))

    def mistakes(self, path: str) -> Iterator[Mistake]:
        """Yield the mistakes in this table at `path`."""
        yield from super().mistakes(path)
        if ALL in self.target_modules and len(self.target_modules) > 1:
            yield Mistake(f"{path}.target_modules", f"names {ALL} and others")

    def file_mistakes(self, folder: Path, model: Path, path: str) -> Iterator[Mistake]:
        """Yield the mistakes in the files of the first adapters of a model's engine, whose table is at `path`."""
        for name, place in self.folders(folder).items():
            try:
                check_adapter(Path(place), model, self.bounds)
            except (AdapterMistake, OSError) as error:
                yield Mistake(join(f"{path}.load", segment(name)), f"{place} cannot be loaded: {error}")


def with_loaded(limits: AdapterLimits | None, last: Engine | None) -> AdapterLimits | None:
    """Return the limits for the next life of an engine, which begins with the adapters of its last life's end."""
    if limits is None or not isinstance(last, HostedEngine) or last.adapters is None:
        return limits
    loaded = {adapter.name: adapter.folder for adapter in last.adapters.adapters}
    later = tuple(name for name, folder in loaded.items() if limits.folders.get(name) != folder)
    return evolve(limits, folders=loaded, dispensable=later)
