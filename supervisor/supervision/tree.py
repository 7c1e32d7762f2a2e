"""The description of a supervision tree: immutable values, validated when they are made, and rendered as text.

Failure policy is data, as in Erlang/OTP's child specifications: the children, the order of their starts, their joint
restarts, their limits of failures. A mistake in it (a significant child that is permanent, an unknown name in `needs`,
a function with other parameters) is a `ValueError` when the value is made, and never a surprise during a restart.
`--check` prints the same value, so an operator reads the limits that the supervisor will enforce.

Nothing in this file runs anything: `supervise.py` does.
"""

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


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        _check(0 < value < inf, f"{owner}: {name} is {value:g}, but must be more than 0 and finite.")


def _check_member(member: Child | Tree) -> None:
    name = member.name
    _check(name != "" and "/" not in name, f"{name!r} is no name for a child: paths are made of names and slashes.")
    can_end = not member.significant or member.restart is not Restart.PERMANENT
    _check(can_end, f"{name}: a significant child ends its tree, so it cannot be permanent.")


class Restart(Enum):
    """Restart policy of a child that has ended by itself."""

    PERMANENT = "permanent"  # always restarted
    TRANSIENT = "transient"  # restarted after an error only
    TEMPORARY = "temporary"  # never restarted, not even together with a sibling


class Strategy(Enum):
    """Restart strategy of a tree: the children that are stopped and restarted together with the failed one."""

    ONE_FOR_ONE = "one for one"  # the failed child alone
    REST_FOR_ONE = "rest for one"  # the failed child and all children after it in the tree
    ONE_FOR_ALL = "one for all"  # all children


@frozen(kw_only=True)
class Backoff:
    """Exponential back-off, in seconds, before the next try of a child that failed to start.

    With `crashes` it also applies to failures of ready children. The wait doubles from `min_s` up to `max_s` with each
    failure, plus a random fraction of up to `jitter` of itself, and starts from `min_s` again once the child has been
    ready for `reset_after_s`.
    """

    min_s: float = 0.5
    max_s: float = 30.0
    jitter: float = 0.2
    reset_after_s: float = 60.0
    crashes: bool = False

    def __attrs_post_init__(self) -> None:
        _check_positive("the back-off", min_s=self.min_s, max_s=self.max_s, reset_after_s=self.reset_after_s)
        _check(self.min_s <= self.max_s, f"the back-off: min_s is {self.min_s:g}, more than max_s, {self.max_s:g}.")
        _check(0 <= self.jitter <= 1, f"the back-off: jitter is {self.jitter:g}, but must be from 0 to 1.")

    def wait_s(self, failures: int, random: float) -> float:
        """Return the wait in seconds after `failures` failures in a row; `random` is from 0 to 1."""
        doublings = min(failures - 1, 64)  # more would overflow, and `max_s` is reached long before
        return min(self.max_s, self.min_s * 2.0**doublings) * (1 + self.jitter * random)


@frozen(kw_only=True)
class Child:  # type: ignore[explicit-any]  # for mypy the `...` of `run` is one
    """One supervised task: `run(*args, task_status=...)`, which calls `task_status.started()` once it is ready.

    It fails if it is not ready within `start_within_s` seconds; when cancelled it must end within `stop_within_s`. When
    a `significant` child ends without an error, its tree is complete and ends without an error as well. `needs` is
    explained in `Tree`. `limits` (name and value) and `about` are for `render` alone.
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
        _check_positive(self.name, start_within_s=self.start_within_s, stop_within_s=self.stop_within_s)
        names = [name for name, _ in self.limits]
        _check(len(set(names)) == len(names), f"{self.name}: two limits have the same name: {', '.join(names)}.")
        try:
            inspect.signature(self.run).bind(*self.args, task_status=None)
        except TypeError as error:
            raise ValueError(f"{self.name}: its function does not fit its {len(self.args)} args: {error}.") from error


@frozen(kw_only=True)
class Tree:
    """A supervisor: its children, in start order, and its restart policy.

    A child is started when all children in its `needs` are ready, and stopped when its dependents have ended, so
    independent children start and stop concurrently. `needs` names earlier siblings; None means all of them. It orders
    the first start and the stop only: a child of a one-for-one tree is restarted without waiting for its siblings. With
    the other strategies every child needs all children before it.

    The tree gives up when more than `restarts_max` failures of its children lie within `restarts_window_s` seconds; its
    parent then handles it as a failed child. With `restarts_max` None it never gives up, not even when a child fails
    its first start; then the parent no longer waits for the tree to be ready.
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
        _check_positive(self.name, restarts_window_s=self.restarts_window_s)
        limit = self.restarts_max
        _check(limit is None or limit >= 0, f"{self.name}: restarts_max is {limit}, but must not be negative.")
        could_spin = limit is None and not self.backoff.crashes
        _check(not could_spin, f"{self.name}: it never gives up, so its back-off must count crashes, or it could spin.")
        names = [child.name for child in self.children]
        _check(len(set(names)) == len(names), f"{self.name}: two children have the same name: {', '.join(names)}.")
        for index, child in enumerate(self.children):
            self._check_needs(child, names[:index])

    def _check_needs(self, child: Child | Tree, earlier: list[str]) -> None:
        if child.needs is None:
            return
        rule = f"{self.name}: {child.name} states what it needs, but in a tree that is {self.strategy.value} each child"
        _check(self.strategy is Strategy.ONE_FOR_ONE, f"{rule} needs all before it.")
        for name in child.needs:
            _check(name in earlier, f"{self.name}: {child.name} needs {name}, which is no child before it.")

    def transitive_needs(self) -> dict[str, frozenset[str]]:
        """Return the direct and indirect needs of each child, by the child's name."""
        needs: dict[str, frozenset[str]] = {}
        for child in self.children:
            direct = needs.keys() if child.needs is None else child.needs
            needs[child.name] = frozenset(direct).union(*(needs[name] for name in direct))
        return needs

    @property
    def stop_within_s(self) -> float:
        """The longest time of a stop in seconds, the longest chain of needs, if no task ignores its cancellation."""
        needs, ended_s = self.transitive_needs(), dict[str, float]()
        for child in reversed(self.children):
            begins_s = max((ended_s[name] for name in ended_s if child.name in needs[name]), default=0.0)
            ended_s[child.name] = begins_s + child.stop_within_s
        return max(ended_s.values(), default=0.0)

    def restarted_with(self, failed: Child | Tree) -> tuple[Child | Tree, ...]:
        """Return the children to stop and restart when `failed` fails, in start order."""
        match self.strategy:
            case Strategy.ONE_FOR_ONE:
                return (failed,)
            case Strategy.REST_FOR_ONE:
                return self.children[[child.name for child in self.children].index(failed.name) :]
            case Strategy.ONE_FOR_ALL:
                return self.children


# Rendering -----------------------------------------------------------------------------


def render(tree: Tree) -> str:
    """Return the tree as text with all its policies, deadlines and limits, `WIDTH` columns wide if its names allow."""
    rows = list(_rows(tree, "", ""))
    column = max(len(first) for first, _, _ in rows) + 2
    lines: list[str] = []
    for first, following, details in rows:
        margin = first
        for detail in details:
            for text in textwrap.wrap(detail, max(WIDTH - column, DETAILS_WIDTH_MIN), break_on_hyphens=False):
                lines.append(f"{margin:<{column}}{text.replace(HARD_SPACE, ' ')}")
                margin = following
    return "\n".join(lines)


def _rows(member: Child | Tree, first: str, following: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the rows of each member: the left margin of the first line, of further lines, and the text beside them."""
    policy = [] if first == "" else [member.restart.value]  # the root has no parent to restart it
    if member.significant:
        policy.append("significant")
    if member.needs is not None:
        policy.append(f"needs {', '.join(member.needs) or 'nothing'}")
    if isinstance(member, Child):
        policy.append(f"starts within {_number(member.start_within_s)} s")
    policy.append(f"stops within {_number(member.stop_within_s)} s")
    yield (
        f"{first}{member.name}",
        f"{following}{'│' if isinstance(member, Tree) and member.children else ''}",
        [member.about, _unbroken(policy), _unbroken(_details(member))],
    )
    children = member.children if isinstance(member, Tree) else ()
    for child in children:
        last = child is children[-1]
        yield from _rows(child, f"{following}{'└─' if last else '├─'} ", f"{following}{' ' if last else '│'}  ")


def _details(member: Child | Tree) -> list[str]:
    if isinstance(member, Child):
        return [f"{name} {_number(limit)}" for name, limit in member.limits]
    backoff, limit = member.backoff, member.restarts_max
    waits = "failures" if backoff.crashes else "failed starts"
    return [
        member.strategy.value,
        "never gives up" if limit is None else f"at most {limit:,} restarts in {_number(member.restarts_window_s)} s",
        f"{waits} wait {_number(backoff.min_s)} to {_number(backoff.max_s)} s",
    ]


def _number(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,g}"


def _unbroken(parts: list[str]) -> str:
    """Join parts with `·`, so that a line is broken only between parts."""
    return " ".join(f"{part}{' ·' if part is not parts[-1] else ''}".replace(" ", HARD_SPACE) for part in parts)
