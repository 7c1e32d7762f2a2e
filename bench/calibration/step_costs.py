"""The costs of an engine's steps from timed requests: a least-squares fit, and its table in `cluster.toml`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt

import numpy as np

COSTS = ("fixed_s", "per_running_s", "per_prefill_token_s", "per_kv_token_s", "overhead_s")
DEPENDENT = 1e-9  # of the greatest singular value: with a smaller one the columns depend on each other


class Unusable(Exception):
    """The reason why a server's answers cannot be used."""


@dataclass(frozen=True)
class Timing:
    """One timed token, and how often each cost is in it."""

    description: str
    seconds: float
    amounts: tuple[float, ...]  # in the order of `COSTS`


@dataclass(frozen=True)
class Fit:
    """The costs with the least error, and that error as a share of the measured times."""

    costs: dict[str, float]
    rms: float  # root mean square of the relative errors
    worst: tuple[float, Timing]


def first_token(seconds: float, prompt_tokens: int) -> Timing:
    """Return the timing of the first token of a request that ran alone."""
    return Timing(f"first token after a prompt of {prompt_tokens}", seconds, (1, 1, prompt_tokens, 0, 1))


def next_token(seconds: float, streams: int, context_tokens: float) -> Timing:
    """Return the timing of a step that gave each stream a token; `context_tokens` is the mean length of one."""
    description = f"next token of {streams} streams of {context_tokens:.0f}"
    return Timing(description, seconds, (1, streams, 0, streams * context_tokens, 0))


def fit(timings: Sequence[Timing]) -> Fit:
    """Return the non-negative costs with the least squared relative error; raises `Unusable` without timings.

    With five costs there are few choices of those above zero: each is tried.
    """
    if not timings:
        raise Unusable("nothing was measured")
    best: tuple[float, dict[str, float]] | None = None
    for size in range(1, len(COSTS) + 1):
        for columns in combinations(range(len(COSTS)), size):
            solution = _solve([[timing.amounts[column] / timing.seconds for column in columns] for timing in timings])
            if solution is None or min(solution) < 0:
                continue
            costs = dict.fromkeys(COSTS, 0.0) | dict(zip((COSTS[column] for column in columns), solution, strict=True))
            error = sum(_error(timing, costs) ** 2 for timing in timings)
            if best is None or error < best[0] * (1 - 1e-6):
                best = error, costs
    assert best is not None, "a fit of one cost always has a solution"
    error, costs = best
    worst = max(((abs(_error(timing, costs)), timing) for timing in timings), key=lambda pair: pair[0])
    return Fit(costs, sqrt(error / len(timings)), worst)


def _error(timing: Timing, costs: dict[str, float]) -> float:
    """Return the relative error of the time that follows from the costs."""
    return sum(amount * costs[name] for name, amount in zip(COSTS, timing.amounts, strict=True)) / timing.seconds - 1


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Return x with the least squared distance of `rows` times x from one; None where the columns depend."""
    matrix = np.array(rows)
    lengths = np.linalg.norm(matrix, axis=0)
    if not lengths.all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix / lengths, np.ones(len(rows)), rcond=DEPENDENT)
    return [float(x) for x in solution / lengths] if rank == len(lengths) else None


def table(name: str, fitted: Fit) -> str:
    """Return the table of `cluster.toml`, with the residual as a comment."""
    lines = [f"[engine.{name}.simulated.costs]"]
    lines += [f"{cost} = {fitted.costs[cost]:.4g}" for cost in COSTS if cost != "overhead_s"]
    share, timing = fitted.worst
    lines.append(
        f"# residual: {100 * fitted.rms:.1f} % (root mean square), at worst {100 * share:.1f} % ({timing.description})"
    )
    lines.append(f"# a first token took {1000 * fitted.costs['overhead_s']:.2f} ms beside its step")
    if not fitted.costs["fixed_s"]:
        lines.append("# fixed_s must be above 0: measure again, with less going on or more repeats")
    return "\n".join(lines)
