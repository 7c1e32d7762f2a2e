"""Tables of sessions: what a turn costs by its number, beside a peer's, and the memory of a session."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bench.rig.result import Cell, Table
from bench.turns.driving import Load, Sample, Turn
from bench.turns.servers import is_engine

FLAT_FROM = 10  # the first of a group of as many turns; those before it are the second group
NOTE = (
    "CPU time for one client's turn, from before its request until 0.1 s after its answer: of the gateway's processes, "
    "and of the workers', which have the engines in them. Reused: the share of the prompt that the engine found in its "
    "cache, by the answer's usage, and the share of the prompts' tokens that were not encoded anew, by the server's "
    "metrics. Turn 1 is the first of its session, of whose text nothing is cached."
)
MEMORY_NOTE = (
    "The growth of the memory of all processes without an engine, from before the first turn until after the last, "
    "over the clients; shared pages are divided among those that share them. With few clients, or in a first round, it "
    "is mostly what a server takes once."
)
RATIO_NOTE = (
    "Medians of the turns of a round; a ratio is ours over the peer's in one round, whose loads follow one another."
)

Figure = Callable[[Turn], float | None]


def _share(reused: float, whole: float) -> float | None:
    return reused / whole if whole else None


FIGURES: dict[str, Figure] = {
    "prompt tokens": lambda turn: statistics.mean(turn.prompt_tokens) if turn.prompt_tokens else None,
    "gateway CPU ms": lambda turn: turn.gateway_ms,
    "workers CPU ms": lambda turn: turn.workers_ms,
    "all CPU ms": lambda turn: turn.gateway_ms + turn.workers_ms,
    "first token ms": lambda turn: statistics.median(turn.first_token_ms),
    "reused by the engine": lambda turn: (
        _share(sum(turn.cached_tokens), sum(turn.prompt_tokens)) if turn.cached_tokens else None
    ),
    "not encoded anew": lambda turn: turn.kept_share,
}
RATIOS = ("gateway CPU ms", "all CPU ms", "first token ms")


def heading(load: Load) -> str:
    """Return a load in a few words."""
    clients = f"{load.clients} client{'s' if load.clients > 1 else ''}"
    sizes = f"{load.tokens:,} tokens in {load.messages} messages, {load.new_tokens:,} new a turn"
    return f"{load.api}, {sizes}, {clients}"


def groups(turns: int) -> dict[str, range]:
    """Return the numbers of turns 1 to `turns` in groups, by their names."""
    starts = [1, 2, *range(FLAT_FROM, turns + 1, FLAT_FROM)]
    ends = [*(start - 1 for start in starts[1:]), turns]
    ranges = (range(start, min(end, turns) + 1) for start, end in zip(starts, ends, strict=True))
    return {_name(each): each for each in ranges if each}


def _name(turns: range) -> str:
    return "1, cold" if turns[0] == 1 else f"{turns[0]}" if len(turns) == 1 else f"{turns[0]}-{turns[-1]}"


def values(sample: Sample, numbers: range, figure: Figure) -> list[float]:
    """Return the values of a figure of the turns with these numbers."""
    found = (figure(turn) for turn in sample.turns if turn.number in numbers)
    return [value for value in found if value is not None]


def by_load(samples: Sequence[Sample]) -> dict[Load, list[Sample]]:
    """Return the samples of each load."""
    result: dict[Load, list[Sample]] = {}
    for sample in samples:
        result.setdefault(sample.load, []).append(sample)
    return result


def tables(title: str, samples: Sequence[Sample]) -> list[Table]:
    """Return for each load a table of its turns, and for all one of memory; each cell has all values."""
    result, memory = [], list[list[Cell]]()
    for load, several in by_load(samples).items():
        rows: list[list[Cell]] = [
            [name, *([each for one in several for each in values(one, numbers, figure)] for figure in FIGURES.values())]
            for name, numbers in groups(load.turns + 1).items()
        ]
        result.append(Table(title=f"{title}: {heading(load)}", columns=("turns", *FIGURES), rows=rows, note=NOTE))
        memory.append([heading(load), [1024 * _gateway_mb(sample) / load.clients for sample in several]])
    titled = f"{title}: memory of a session"
    return [*result, Table(title=titled, columns=("", "kB"), rows=memory, note=MEMORY_NOTE)]


def _gateway_mb(sample: Sample) -> float:
    return sum(grown for group, grown in sample.memory_mb.items() if not is_engine(group))


def ratio_tables(theirs: str, ours: str, pairs: Sequence[tuple[Sample, Sample]]) -> list[Table]:
    """Return a table for each two loads: the medians of each round's turns, and ours over the peer's."""
    several: dict[tuple[Load, Load], list[tuple[Sample, Sample]]] = {}
    for pair in pairs:
        several.setdefault((pair[0].load, pair[1].load), []).append(pair)
    return [
        Table(
            title=_beside(*loads),
            columns=("", theirs, ours, "ratio"),
            rows=[
                row
                for name, numbers in (("cold turn", range(1, 2)), ("further turns", range(2, loads[1].turns + 2)))
                for figure in RATIOS
                if (row := _ratio_row(name, numbers, figure, rounds)) is not None
            ],
            note=f"{RATIO_NOTE} {NOTE}",
        )
        for loads, rounds in several.items()
    ]


def _beside(theirs: Load, ours: Load) -> str:
    return heading(ours) if theirs.api == ours.api else f"{heading(ours)}, beside {theirs.api}"


def _ratio_row(name: str, numbers: range, figure: str, rounds: Sequence[tuple[Sample, Sample]]) -> list[Cell] | None:
    theirs, ours = (
        [statistics.median(found) for each in rounds if (found := values(each[side], numbers, FIGURES[figure]))]
        for side in (0, 1)
    )
    if not theirs or len(theirs) != len(ours):
        return None
    ratios: list[float] = [own / other for other, own in zip(theirs, ours, strict=True) if other]
    return [f"{name}: {figure}", theirs, ours, ratios]


def notes(title: str, samples: Sequence[Sample]) -> list[str]:
    """Return what a reader of the figures must know."""
    idle = statistics.median(sample.idle_ms_a_s for sample in samples)
    lines = [
        f"{title} has a gateway that spends {idle:.1f} ms a second while it does nothing; 0.1 s of it is in a turn"
    ]
    off = {heading(each.load) for each in samples if not _is_size(each)}
    return [*lines, *(f"OTHER LENGTH: {name}: the first prompt differs from it by more than a tenth" for name in off)]


def _is_size(sample: Sample) -> bool:
    wanted = sample.load.tokens
    return all(abs(tokens - wanted) <= wanted / 10 for tokens in sample.turns[0].prompt_tokens)
