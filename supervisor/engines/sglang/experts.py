"""`[engine.NAME.experts]` of an SGLang engine: where the experts of a mixture are, and the record of their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import attrs
from attrs import frozen

from actors.engines.sglang.spec import Setting
from protocol.strict.checks import Within
from protocol.strict.mistakes import Mistake
from supervisor.config.limits import Count
from supervisor.files import reading

LAYOUT_BYTES_MAX = 16 * 1024 * 1024
LAYOUT_KEYS = ("logical_count", "physical_to_logical_map")
BY_RANK = ("static", "lp")  # ways of dispatch that choose another copy on each rank
NEEDS_BALANCING, NEEDS_RECORD = ("rebalance_steps",), ("record_steps",)


@frozen(kw_only=True)
class SglangExperts:
    """`[engine.NAME.experts]`: where the experts of a mixture are, and the record of their tokens."""

    parallel: Count = 1  # ranks that share the experts of each layer; SGLang's expert parallelism
    balancing: bool = False  # whether busy experts are moved and copied while the engine serves
    rebalance_steps: Count = 1000  # engine steps between two of these moves
    redundant: Annotated[int, Within(at_least=0)] = 0  # further copies of experts in each layer
    # how the copy of an expert is chosen for a token; by default `static` with an all-to-all backend, else `dynamic`
    dispatch: Literal["static", "dynamic", "lp"] | None = None
    # JSON file with the place of each expert at the start: the `.json` of a record, or SGLang's own map of places
    layout: str | None = None
    # whether the tokens of each expert can be recorded: `stat` counts all, `stat_approx` what DeepEP dispatches
    record: Literal["stat", "stat_approx"] | None = None
    record_steps: Count = 1000  # most engine steps of a record; beyond, the oldest are forgotten

    def arguments(self, folder: Path) -> dict[str, Setting]:
        """Return SGLang's arguments, of which a relative `layout` lies in `folder`."""
        given: dict[str, Setting] = {
            "ep_size": self.parallel if self.parallel > 1 else None,
            "enable_eplb": self.balancing or None,
            "eplb_rebalance_num_iterations": self.rebalance_steps if self.balancing else None,
            "ep_num_redundant_experts": self.redundant or None,
            "ep_dispatch_algorithm": self.dispatch,
            "init_expert_location": None if self.layout is None else str(self.layout_path(folder)),
            "expert_distribution_recorder_mode": self.record,
            "expert_distribution_recorder_buffer_size": self.record_steps if self.record else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def layout_path(self, folder: Path) -> Path:
        """Return the file of the initial layout, which is given relative to `folder`."""
        assert self.layout is not None
        return (folder / Path(self.layout).expanduser()).resolve()

    @property
    def ranks_recorded(self) -> int:
        """The ranks whose tokens follow from those of each expert: each has an equal share in their order."""
        return 1 if self.redundant or self.layout is not None else self.parallel

    def mistakes(self, path: str, device: str | None, ranks: int, settings: Mapping[str, object]) -> Iterator[Mistake]:
        """Yield the contradictions among its keys, and to an engine of so many tensor-parallel `ranks`."""
        copies = settings.get("moe_dp_size", 1)
        share = ranks // copies if isinstance(copies, int) and copies > 0 else ranks
        all_to_all = settings.get("moe_a2a_backend", "none")
        if self.parallel > 1 and device == "cpu":
            yield Mistake(f"{path}.parallel", "is for GPUs: SGLang shares no experts on a CPU")
        elif self.parallel > 1 and self.parallel != share:
            yield Mistake(f"{path}.parallel", f"must be all tensor-parallel ranks, which are {share} here")
        if self.balancing and self.parallel == 1:
            yield Mistake(f"{path}.balancing", "needs ranks that share the experts: set parallel")
        if self.redundant and self.parallel == 1:
            yield Mistake(f"{path}.redundant", "means nothing without parallel: one rank has every expert")
        if self.dispatch is not None and not (self.balancing or self.redundant or self.layout):
            yield Mistake(f"{path}.dispatch", "means nothing where no expert has a copy: see redundant")
        elif self.dispatch in BY_RANK and all_to_all == "none":
            yield Mistake(
                f"{path}.dispatch", f"{self.dispatch} needs settings.moe_a2a_backend; without one, it is dynamic"
            )
        yield from self._record_mistakes(path, settings)
        for key in self._idle_keys():
            yield Mistake(
                f"{path}.{key}", f"means nothing without {'balancing' if key in NEEDS_BALANCING else 'record'}"
            )

    def _record_mistakes(self, path: str, settings: Mapping[str, object]) -> Iterator[Mistake]:
        if self.record is None:
            return
        if self.balancing:
            yield Mistake(f"{path}.record", "balancing records by itself, and a second record would take its numbers")
        if settings.get("expert_balancedness_report_mode", "off") != "off":
            yield Mistake(f"{path}.record", "settings.expert_balancedness_report_mode records by itself")
        if self.record == "stat_approx" and (
            settings.get("moe_a2a_backend") != "deepep" or settings.get("deepep_mode") != "normal"
        ):
            yield Mistake(
                f"{path}.record", "stat_approx needs settings.moe_a2a_backend = deepep and deepep_mode = normal"
            )

    def _idle_keys(self) -> Iterator[str]:
        """Yield the keys that are given and have no effect."""
        fields = attrs.fields_dict(type(self))
        for keys, used in ((NEEDS_BALANCING, self.balancing), (NEEDS_RECORD, self.record is not None)):
            yield from (key for key in keys if not used and getattr(self, key) != fields[key].default)


def layout_mistake(file: Path) -> str | None:
    """Return what is wrong with the file of an initial layout, None if it can be one."""
    if file.suffix == ".pt":
        return f"{file} is a pickle, which can run code: give the .json of dump-expert-record"
    if file.suffix != ".json":
        return f"{file} must end in .json: SGLang goes by that"
    try:
        why = _content_mistake(json.loads(reading.read(file, LAYOUT_BYTES_MAX)))
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        why = f"is no JSON: {error}"
    return None if why is None else f"{file} {why}"


def _content_mistake(data: object) -> str | None:
    """Return what keeps data from being a layout: a list of numbers for each layer, all of one length."""
    given = [key for key in LAYOUT_KEYS if isinstance(data, dict) and key in data]
    if not isinstance(data, dict) or len(given) != 1:
        return f"must have {' or '.join(LAYOUT_KEYS)}"
    rows = data[given[0]]
    if not (isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)):
        return f"must have a list of experts for each layer in {given[0]}"
    numbers = all(type(number) is int and number >= 0 for row in rows for number in row)
    if not numbers or len({len(row) for row in rows}) != 1:
        return f"must have as many whole numbers in each layer of {given[0]}"
    return None
