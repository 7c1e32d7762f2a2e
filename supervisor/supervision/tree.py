"""What a tree looks like: a plain value, checked before anything starts, and printed as text."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from enum import Enum
from math import inf

from attrs import frozen

WIDTH = 100
DETAILS_WIDTH_MIN = 40
HARD_SPACE = "\N{NO-BREAK SPACE}"


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def _more_than_zero(owner: str, **named: float) -> None:
    for name, value in named.items():
        _check(0 < value < inf, f"{owner}: {name} is {value:g}, but must be more than 0 and finite.")


def _check_member(member: Child | Tree) -> None:
    name = member.name
    _check(name != "" and "/" not in name, f"{name!r} is no name for a child: paths are made of names and slashes.")
    ends_at_last = not member.significant or member.restart is not Restart.PERMANENT
    _check(ends_at_last, f"{name}: a significant child ends its tree, so it cannot be permanent.")


class Restart(Enum):
    """When a child that has ended by itself is started again."""

    PERMANENT = "permanent"  # always
    TRANSIENT = "transient"  # only after an error
    TEMPORARY = "temporary"  # never, not even together with a sibling


class Strategy(Enum):
    """Which children are stopped and started again with the one that failed."""

    ONE_FOR_ONE = "one for one"  # it alone
    REST_FOR_ONE = "rest for one"  # it and all that were started after it
    ONE_FOR_ALL = "one for all"


@frozen(kw_only=True)
class Backoff:
    """How long to wait before a child is tried again that could not start, and with `crashes` one that crashed later.

    The wait doubles from `min_s` up to `max_s` with each such failure, and chance lengthens it by up to the fraction
    `jitter` of itself. It begins at `min_s` again once the child has lived for `reset_after_s`.
    """

    min_s: float = 0.5
    max_s: float = 30.0
    jitter: float = 0.2
    reset_after_s: float = 60.0
    crashes: bool = False

    def __attrs_post_init__(self) -> None:
        _more_than_zero("the back-off", min_s=self.min_s, max_s=self.max_s, reset_after_s=self.reset_after_s)
        _check(self.min_s <= self.max_s, f"the back-off: min_s is {self.min_s:g}, more than max_s, {self.max_s:g}.")
        _check(0 <= self.jitter <= 1, f"the back-off: jitter is {self.jitter:g}, but must be from 0 to 1.")

    def wait_s(self, failures: int, chance: float) -> float:
        """Return the wait after so many failures in a row; `chance` is a number from 0 to 1."""
        doublings = min(failures - 1, 64)  # more would only overflow
        return min(self.max_s, self.min_s * 2.0**doublings) * (1 + self.jitter * chance)


@frozen(kw_only=True)
class Child:  # type: ignore[explicit-any]  # for mypy the `...` of `run` is one
    """One actor: `run(*args, task_status=...)`, which calls `task_status.started()` once it is ready to serve.

    Where a `significant` child ends without an error, its tree has done what it was for, and ends well too. `needs` as
    in `Tree`.
    """

    name: str
    run: Callable[..., Awaitable[None]]  # type: ignore[explicit-any]  # checked against `args` below
    args: tuple[object, ...] = ()
    restart: Restart = Restart.PERMANENT
    start_within_s: float = 5.0
    stop_within_s: float = 5.0
    significant: bool = False
    needs: tuple[str, ...] | None = None
    limits: tuple[tuple[str, int | float], ...] = ()
    about: str = ""

    def __attrs_post_init__(self) -> None:
        _check_member(self)
        _more_than_zero(self.name, start_within_s=self.start_within_s, stop_within_s=self.stop_within_s)
        names = [name for name, _ in self.limits]
        _check(len(set(names)) == len(names), f"{self.name}: two limits have the same name: {', '.join(names)}.")
        try:
            inspect.signature(self.run).bind(*self.args, task_status=None)
        except TypeError as error:
            raise ValueError(f"{self.name}: its function does not fit its {len(self.args)} args: {error}.") from error


@frozen(kw_only=True)
class Tree:
    """Children that are started from the first to the last and stopped from the last to the first.

    Each is started once those that it needs are ready, and stopped once those that need it have ended: children that
    need nothing of each other start and stop together. `needs` names earlier siblings; None means all of them. It
    orders the first start and the stop. A child of a one-for-one tree is restarted whatever its siblings do, and in the
    other trees every child needs those before it.

    The tree gives up when more than `restarts_max` of its children's failures lie within `restarts_window_s`. For the
    tree above it is then a child that failed. With `restarts_max` None it never gives up, not even when a child fails
    its first start, and the tree above waits for it no longer than until then.
    """

    name: str
    children: tuple[Child | Tree, ...]
    strategy: Strategy = Strategy.ONE_FOR_ONE
    restarts_max: int | None = 3
    restarts_window_s: float = 30.0
    restart: Restart = Restart.PERMANENT
    backoff: Backoff = Backoff()
    significant: bool = False
    needs: tuple[str, ...] | None = None
    about: str = ""

    def __attrs_post_init__(self) -> None:
        _check_member(self)
        _more_than_zero(self.name, restarts_window_s=self.restarts_window_s)
        most = self.restarts_max
        _check(most is None or most >= 0, f"{self.name}: restarts_max is {most}, but must not be negative.")
        endless = most is None and not self.backoff.crashes
        _check(not endless, f"{self.name}: it never gives up, so its back-off must count crashes, or it could spin.")
        names = [child.name for child in self.children]
        _check(len(set(names)) == len(names), f"{self.name}: two children have the same name: {', '.join(names)}.")
        for place, child in enumerate(self.children):
            self._check_needs(child, names[:place])

    def _check_needs(self, child: Child | Tree, before: list[str]) -> None:
        if child.needs is None:
            return
        only = f"{self.name}: {child.name} says what it needs, but in a tree that is {self.strategy.value} each child"
        _check(self.strategy is Strategy.ONE_FOR_ONE, f"{only} needs all before it.")
        for name in child.needs:
            _check(name in before, f"{self.name}: {child.name} needs {name}, which is no child before it.")

    def needed(self) -> dict[str, frozenset[str]]:
        """Return which siblings each child needs, also by way of others."""
        found: dict[str, frozenset[str]] = {}
        for child in self.children:
            direct = found.keys() if child.needs is None else child.needs
            found[child.name] = frozenset(direct).union(*(found[name] for name in direct))
        return found

    @property
    def stop_within_s(self) -> float:
        """How long stopping may take, if nothing ignores its cancellation: as long as the longest chain of needs."""
        needed, by = self.needed(), dict[str, float]()  # when each has ended
        for child in reversed(self.children):
            begins = max((by[name] for name in by if child.name in needed[name]), default=0.0)
            by[child.name] = begins + child.stop_within_s
        return max(by.values(), default=0.0)

    def restarted_with(self, failed: Child | Tree) -> tuple[Child | Tree, ...]:
        """Return the children that are stopped, and started again, when one of them fails."""
        match self.strategy:
            case Strategy.ONE_FOR_ONE:
                return (failed,)
            case Strategy.REST_FOR_ONE:
                return self.children[[child.name for child in self.children].index(failed.name) :]
            case Strategy.ONE_FOR_ALL:
                return self.children


# As text -------------------------------------------------------------------------------


def render(tree: Tree) -> str:
    """Print the tree with every policy, deadline and limit in it, in `WIDTH` columns where its names allow."""
    rows = list(_rows(tree, "", ""))
    column = max(len(first) for first, _, _ in rows) + 2
    lines: list[str] = []
    for first, others, details in rows:
        margin = first
        for detail in details:
            for text in textwrap.wrap(detail, max(WIDTH - column, DETAILS_WIDTH_MIN), break_on_hyphens=False):
                lines.append(f"{margin:<{column}}{text.replace(HARD_SPACE, ' ')}")
                margin = others
    return "\n".join(lines)


def _rows(member: Child | Tree, first: str, others: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield what stands left of each member's first line and of its other lines, and what stands right of them."""
    policy = [] if first == "" else [member.restart.value]  # nobody restarts the root
    if member.significant:
        policy.append("significant")
    if member.needs is not None:
        policy.append(f"needs {', '.join(member.needs) or 'nothing'}")
    if isinstance(member, Child):
        policy.append(f"starts within {_number(member.start_within_s)} s")
    policy.append(f"stops within {_number(member.stop_within_s)} s")
    yield (
        f"{first}{member.name}",
        f"{others}{'│' if isinstance(member, Tree) and member.children else ''}",
        [member.about, _together(policy), _together(_particulars(member))],
    )
    children = member.children if isinstance(member, Tree) else ()
    for child in children:
        last = child is children[-1]
        yield from _rows(child, f"{others}{'└─' if last else '├─'} ", f"{others}{' ' if last else '│'}  ")


def _particulars(member: Child | Tree) -> list[str]:
    if isinstance(member, Child):
        return [f"{name} {_number(limit)}" for name, limit in member.limits]
    backoff, most = member.backoff, member.restarts_max
    waits = "failures" if backoff.crashes else "failed starts"
    return [
        member.strategy.value,
        "never gives up" if most is None else f"at most {most:,} restarts in {_number(member.restarts_window_s)} s",
        f"{waits} wait {_number(backoff.min_s)} to {_number(backoff.max_s)} s",
    ]


def _number(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,g}"


def _together(parts: list[str]) -> str:
    """Join parts so that a line may break between two of them, but in none."""
    return " ".join(f"{part}{' ·' if part is not parts[-1] else ''}".replace(" ", HARD_SPACE) for part in parts)
