"""`[pool.NAME]` and `[model.NAME.grid]`: pools of engines, and the mapping of requests to them.

A missing key is None here, and so one mistake among all others (`pool_checks.py`). `grid` makes a router's values from
a file without mistakes.
"""

from __future__ import annotations

from typing import Annotated, Protocol, TypeAlias

from attrs import frozen

from actors.routing.pools.grid import Axis, Grid
from protocol.dialects.targets import ITL_FIELD, TTFT_FIELD, TargetMs
from protocol.strict.checks import Holds, Matches, Within

RESOLUTION_MAX = 64
POOLS_MAX = 1024
PoolName = Annotated[str, Matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "letters, digits, dashes, dots and _")]
PoolPriority = Annotated[int, Within(at_least=-1_000_000, at_most=1_000_000)]
Tokens = Annotated[int, Within(at_least=0, at_most=1_000_000_000)]
Resolution = Annotated[int, Within(at_least=1, at_most=RESOLUTION_MAX)]
Row = Annotated[tuple[str, ...], Holds(0, RESOLUTION_MAX)]
Mapping: TypeAlias = Annotated[tuple[Row, ...], Holds(0, RESOLUTION_MAX)]


@frozen(kw_only=True)
class PoolSection:
    """`[pool.NAME]`: engines of one model and leg, of any nodes, that serve the same requests."""

    engines: tuple[str, ...] = ()  # names of its engines, on any nodes, of one model and leg
    priority: PoolPriority = 0  # a pool of higher priority is faster, and stands in for one that refuses or is down


@frozen
class AxisKeys:
    """The names of the keys of an axis, and their values in a section."""

    low_key: str
    high_key: str
    resolution_key: str
    low: float | None
    high: float | None
    resolution: int | None

    @property
    def axis(self) -> Axis:
        """The axis of a section without missing keys."""
        assert self.low is not None
        assert self.high is not None
        assert self.resolution is not None
        return Axis(float(self.low), float(self.high), self.resolution)


class GridSection(Protocol):
    """The common parts of both kinds of grids: two axes and the mapping of their cells."""

    @property
    def lengths(self) -> AxisKeys:
        """The rows: lengths in tokens."""

    @property
    def targets(self) -> AxisKeys:
        """The columns: targets in milliseconds."""

    @property
    def pools(self) -> tuple[tuple[str, ...], ...]:
        """A row of names of pools for each cell of lengths."""


@frozen(kw_only=True)
class InputGrid:
    """`[model.NAME.grid.prefill]` and `[model.NAME.grid.both]`: pools by length of the prompt; all keys are needed."""

    input_tokens_min: Tokens | None = None  # lower end of the lengths of prompts; shorter ones count as this long
    input_tokens_max: Tokens | None = None  # upper end of the lengths of prompts; longer ones count as this long
    input_resolution: Resolution | None = None  # number of equal cells between the two
    ttft_min_ms: TargetMs | None = None  # lower end of the targets of the first token
    ttft_max_ms: TargetMs | None = None  # upper end of the targets of the first token
    ttft_resolution: Resolution | None = None  # number of equal cells between the two
    pools: Mapping = ()  # a row for each cell of lengths, with the name of a pool for each cell of targets

    @property
    def lengths(self) -> AxisKeys:
        """The rows: tokens of the prompt."""
        values = self.input_tokens_min, self.input_tokens_max, self.input_resolution
        return AxisKeys("input_tokens_min", "input_tokens_max", "input_resolution", *values)

    @property
    def targets(self) -> AxisKeys:
        """The columns: the target of the first token."""
        values = self.ttft_min_ms, self.ttft_max_ms, self.ttft_resolution
        return AxisKeys("ttft_min_ms", "ttft_max_ms", "ttft_resolution", *values)


@frozen(kw_only=True)
class ContextGrid:
    """`[model.NAME.grid.decode]`: pools by length of the context; all keys are needed."""

    # lower end of the lengths of prompt and answer so far; shorter ones count as this long
    context_tokens_min: Tokens | None = None
    context_tokens_max: Tokens | None = None  # upper end of these lengths; longer ones count as this long
    context_resolution: Resolution | None = None  # number of equal cells between the two
    itl_min_ms: TargetMs | None = None  # lower end of the targets between two tokens
    itl_max_ms: TargetMs | None = None  # upper end of the targets between two tokens
    itl_resolution: Resolution | None = None  # number of equal cells between the two
    pools: Mapping = ()  # a row for each cell of lengths, with the name of a pool for each cell of targets

    @property
    def lengths(self) -> AxisKeys:
        """The rows: tokens of the prompt, and of an answer's part from before a resume."""
        values = self.context_tokens_min, self.context_tokens_max, self.context_resolution
        return AxisKeys("context_tokens_min", "context_tokens_max", "context_resolution", *values)

    @property
    def targets(self) -> AxisKeys:
        """The columns: the target between two tokens."""
        values = self.itl_min_ms, self.itl_max_ms, self.itl_resolution
        return AxisKeys("itl_min_ms", "itl_max_ms", "itl_resolution", *values)


TARGETS = {TTFT_FIELD: ("prefill", "both"), ITL_FIELD: ("decode",)}
"""The grids that read each target."""


@frozen(kw_only=True)
class GridSections:
    """`[model.NAME.grid]`: the grid of each leg; the requests of a leg without one go to any engine."""

    prefill: InputGrid | None = None
    decode: ContextGrid | None = None
    both: InputGrid | None = None

    @property
    def by_leg(self) -> dict[str, GridSection]:
        """The given grids."""
        grids: dict[str, GridSection | None] = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        return {leg: grid for leg, grid in grids.items() if grid is not None}

    @property
    def targets(self) -> frozenset[str]:
        """The targets that the given grids read."""
        return frozenset(target for target, legs in TARGETS.items() if not self.by_leg.keys().isdisjoint(legs))


def grid(section: GridSection) -> Grid:
    """Return the grid of a section without mistakes."""
    return Grid(section.lengths.axis, section.targets.axis, section.pools)
