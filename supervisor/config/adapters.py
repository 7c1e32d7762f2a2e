"""`[engine.NAME.adapters]`: the LoRA adapters of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from attrs import Factory, frozen

from protocol.messages.adapters import ADAPTERS_MAX, name_mistake
from protocol.strict.checks import Holds, Within
from protocol.strict.mistakes import Mistake, join, segment

AdapterCount = Annotated[int, Within(at_least=1, at_most=ADAPTERS_MAX)]


@frozen(kw_only=True)
class AdaptersSection:
    """`[engine.NAME.adapters]`: with it, an engine takes requests for adapters, and loads and unloads them."""

    loaded_max: AdapterCount = 16  # adapters that it has loaded at a time
    load: dict[str, Annotated[str, Holds(1)]] = Factory(dict)  # folders of adapters that it loads at its start, by name

    def folders(self, folder: Path) -> dict[str, str]:
        """Return the whole paths of its adapters' folders; relative ones begin at the file's `folder`."""
        return {name: str((folder / Path(path).expanduser()).resolve()) for name, path in self.load.items()}

    def mistakes(self, path: str) -> Iterator[Mistake]:
        """Yield the mistakes in this table at `path`."""
        for name in self.load:
            if (why := name_mistake(name)) is not None:
                yield Mistake(join(f"{path}.load", segment(name)), f"the name of an adapter {why}")
        if len(self.load) > self.loaded_max:
            yield Mistake(f"{path}.loaded_max", f"is {self.loaded_max}, and load names {len(self.load)} adapters")
