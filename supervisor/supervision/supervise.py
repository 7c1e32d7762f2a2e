"""Run a tree: start what may start, watch, restart by strategy, stop in the order of needs.

The loop acts on two facts: which lives there are, and which children are still to be started. It waits for nothing but
the next change of either, so that it looks after every child while some start, are too slow, or wait for their turn;
only the stop of a group whose members need each other is waited for. A life that has ended is found among the first, so
none is lost; and no child is started beside a life of its own that will not end. Only the loop ends a life: each has
its own scope, shielded from what is cancelled around it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import NoReturn, Protocol

import trio
from attrs import define, field, frozen

from protocol.errors import ActorError, StartFailed
from supervisor.supervision.events import ChildEvent, ChildEventKind, error_text, log_event
from supervisor.supervision.tree import Child, Restart, Strategy, Tree

log = logging.getLogger(__name__)


class RestartsExceeded(ActorError):
    """The children of a tree failed more often than it allows; the tree above decides what follows."""


class RandomSource(Protocol):
    """Where chance comes from; a `random.Random` will do."""

    def random(self) -> float:
        """Return a number from 0 to 1."""


_Tell = Callable[[ChildEvent], None]


def nothing(happening: ChildEvent) -> None:
    """Watch without looking."""


async def supervise(
    tree: Tree,
    *,
    rng: RandomSource,
    watch: Callable[[ChildEvent], None] = nothing,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep `tree` alive until this is cancelled, or until a significant child has done its work.

    Raises `StartFailed` if the tree does not come up, and `RestartsExceeded` if it does not stay up. `watch` sees each
    happening as it happens and must neither wait nor raise; each is logged besides.
    """

    def tell(happening: ChildEvent) -> None:
        log_event(happening)
        try:
            watch(happening)
        except Exception:  # a tree must not fall because of who looks at it
            log.exception("Whoever watches the tree failed at: %s", happening)

    def is_up() -> None:
        task_status.started()

    await _Loop(tree, tree.name, rng, tell, _Above(is_up)).supervise()


@frozen
class _Above:
    """What a tree tells the one above it."""

    is_up: Callable[[], None]
    tries_again: Callable[[], None] = lambda: None  # though it is not up: whoever waits for that need not
    let_go: Callable[[], None] = lambda: None  # it stops, but for a task that does not


@define(eq=False)
class _Life:
    """One life of one child, and the `task_status` that the child gets for it."""

    child: Child | Tree
    path: str
    is_ready: Callable[[_Life], None]
    scope: trio.CancelScope = field(factory=lambda: trio.CancelScope(shield=True))
    over: bool = False
    let_go: bool = False  # a tree that had to leave something behind
    begun_at: float = field(factory=trio.current_time)
    ready_at: float | None = None
    tries_again: bool = False  # a tree that never gives up, and that is not up
    too_slow: StartFailed | None = None  # why it was asked to end; a failure, once it has ended or ignored that
    stopping_at: float | None = None
    stop_by: float | None = None  # None: nobody has asked it to end
    deaf: bool = False
    error: BaseException | None = None

    def started(self, value: object = None) -> None:  # noqa: ARG002  # Trio's servers pass their listeners
        """Note that the child is ready to serve."""
        if self.ready_at is not None:
            raise RuntimeError(f"{self.path} called started() a second time.")
        if self.stop_by is None and not self.over:  # else it comes too late
            self.ready_at = trio.current_time()
            self.is_ready(self)

    @property
    def start_by(self) -> float:
        """When it must be ready, if it is still to be; the children of a tree have their own deadlines."""
        waits = isinstance(self.child, Child) and self.ready_at is None and self.stop_by is None
        return self.begun_at + self.child.start_within_s if isinstance(self.child, Child) and waits else inf


class _Loop:
    """What one tree knows about its children while it runs."""

    _nursery: trio.Nursery

    def __init__(self, tree: Tree, path: str, rng: RandomSource, tell: _Tell, above: _Above) -> None:
        self._tree = tree
        self._path = path
        self._rng = rng
        self._tell = tell
        self._above = above
        self._needs = tree.needed()
        self._lives: dict[str, _Life] = {}  # all that are not known to be over
        self._to_start = {child.name: -inf for child in tree.children}  # and not before when
        self._begun: set[str] = set()  # the children that have been started once
        self._failures: deque[float] = deque(maxlen=(tree.restarts_max or 0) + 1)  # when the last of them were
        self._in_a_row: dict[str, int] = {}  # the failures of each child that lengthen its next wait
        self._up = False  # every child has been ready, or tries again by itself
        self._changed = trio.Event()  # a life has become ready, is over, or needs nobody's patience

    async def supervise(self) -> None:
        """Run until cancelled, done or given up, and then stop."""
        gave_up: ActorError | None = None
        async with trio.open_nursery() as self._nursery:
            try:
                await self._run()
            except ActorError as error:
                gave_up = error  # raised below: here, the nursery would wrap it in a group
            finally:
                with trio.CancelScope(shield=True):  # its deadlines are those of the children
                    await self._stop(self._tree.children)
                if not all(life.over for life in self._lives.values()):
                    self._above.let_go()
        if gave_up is not None:
            raise gave_up

    async def _run(self) -> None:
        """React to what has ended, start what is to be started, and wait for the next of either."""
        while True:
            await trio.lowlevel.checkpoint()  # start nothing for a tree that is to stop
            if any(_completes(life) for life in self._lives.values()):
                break
            if (fallen := self._fallen()) is not None:
                await self._failed(*fallen)
                continue
            self._changed = trio.Event()
            start_at = self._start()
            if not self._up and not self._to_start and all(_is_there(life) for life in self._lives.values()):
                self._up = True
                self._above.is_up()
            with trio.move_on_at(min(start_at, self._next_deadline())):
                await self._changed.wait()
        if not self._up:
            self._above.is_up()  # its work was done before all were up

    # Stopping ----------------------------------------------------------------------------

    async def _stop(self, children: tuple[Child | Tree, ...]) -> None:
        """End the lives of `children`, from the last to the first: each when those that need it are gone."""
        left = [child for child in reversed(children) if child.name in self._lives]
        while True:
            self._changed = trio.Event()
            for child in tuple(left):
                needed = any(child.name in self._needs[other.name] for other in left)
                if not needed and self._is_stopped(self._lives[child.name]):
                    left.remove(child)
            if not left:
                return
            lives = [self._lives[child.name] for child in left]
            asked = [life.stop_by for life in lives if life.stop_by is not None and not life.deaf]
            with trio.move_on_at(min(asked, default=inf)):
                await self._changed.wait()

    def _is_stopped(self, life: _Life) -> bool:
        """Ask a life to end, unless that has been done, and return whether there is nothing left to wait for."""
        if life.over:
            del self._lives[life.child.name]
            return True
        self._ask_to_end(life)
        return life.let_go or self._ignores_cancel(life)

    def _ask_to_end(self, life: _Life) -> None:
        if life.stop_by is None:
            within_s = life.child.stop_within_s if isinstance(life.child, Child) else inf  # its children have theirs
            life.stopping_at = trio.current_time()
            life.stop_by = life.stopping_at + within_s
            self._happened(life.path, ChildEventKind.STOPPING)
            life.scope.cancel(reason="stopped by its supervisor")

    def _ignores_cancel(self, life: _Life) -> bool:
        """Return whether a life has not ended in time, and say so once."""
        if not life.deaf and life.stop_by is not None and trio.current_time() >= life.stop_by:
            life.deaf = True
            self._happened(life.path, ChildEventKind.IGNORES_CANCEL)
        return life.deaf

    # Starting ----------------------------------------------------------------------------

    def _start(self) -> float:
        """Begin the lives that may begin now, and return when the next one may."""
        soonest, now = inf, trio.current_time()
        for child in self._tree.children:
            if child.name in self._to_start and child.name not in self._lives and self._has_what_it_needs(child):
                if (start_at := self._to_start[child.name]) > now:
                    soonest = min(soonest, start_at)
                    continue
                del self._to_start[child.name]
                self._begun.add(child.name)
                life = self._lives[child.name] = _Life(child, f"{self._path}/{child.name}", self._is_ready)
                self._happened(life.path, ChildEventKind.STARTING)
                self._nursery.start_soon(self._live, life, name=life.path)
        return soonest

    def _has_what_it_needs(self, child: Child | Tree) -> bool:
        """Whether all that a child needs is ready, or will not come again; one for one, a restart needs nothing."""
        if self._tree.strategy is Strategy.ONE_FOR_ONE and child.name in self._begun:
            return True
        lives = (self._lives.get(name) for name in self._needs[child.name])
        missing = self._needs[child.name] & self._to_start.keys()
        return not missing and all(life is None or life.over or _is_there(life) for life in lives)

    def _next_deadline(self) -> float:
        """Return when the next life will have been too slow to start, or to end because of that."""
        lives = self._lives.values()
        too_slow = (life.stop_by for life in lives if life.too_slow is not None and life.stop_by is not None)
        return min((*(life.start_by for life in lives), *too_slow), default=inf)

    async def _live(self, life: _Life) -> None:
        child = life.child
        try:
            with life.scope:
                if isinstance(child, Tree):
                    above = _Above(life.started, partial(self._tries_again, life), partial(self._lets_go, life))
                    await _Loop(child, life.path, self._rng, self._tell, above).supervise()
                else:
                    await child.run(*child.args, task_status=life)
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop decides what follows
            life.error = error
        except BaseException as error:  # KeyboardInterrupt and its like end more than this tree
            life.error = error
            raise
        finally:
            self._is_over(life)

    # What happens to lives --------------------------------------------------------------

    def _is_ready(self, life: _Life) -> None:
        self._happened(life.path, ChildEventKind.STARTED, since=life.begun_at)
        self._changed.set()

    def _tries_again(self, life: _Life) -> None:
        life.tries_again = True
        self._changed.set()

    def _lets_go(self, life: _Life) -> None:
        life.let_go = True
        self._changed.set()

    def _is_over(self, life: _Life) -> None:
        if life.stop_by is not None:
            kind = ChildEventKind.STOPPED
        elif life.ready_at is None and life.error is None:
            kind, life.error = ChildEventKind.FAILED, StartFailed(f"{life.path} ended before it was ready.")
        else:
            kind = ChildEventKind.ENDED if life.error is None else ChildEventKind.FAILED
        if life.ready_at is not None and trio.current_time() - life.ready_at >= self._tree.backoff.reset_after_s:
            self._in_a_row.pop(life.child.name, None)
        self._happened(life.path, kind, life.error, since=life.stopping_at)
        life.over = True
        self._changed.set()

    def _fallen(self) -> tuple[_Life, BaseException | None] | None:
        """Forget lives that are over, up to the first that has failed or is to run again, and return it and why.

        The first among the children, not in time: those after it may have fallen only because it fell.
        """
        for child in self._tree.children:
            life = self._lives.get(child.name)
            if life is None:
                continue
            if trio.current_time() >= life.start_by and not life.over:
                within_s = life.start_by - life.begun_at
                life.too_slow = StartFailed(f"{life.path} was not ready within {within_s:g} s.")
                self._happened(life.path, ChildEventKind.FAILED, life.too_slow)
                self._ask_to_end(life)
            if life.over:
                del self._lives[child.name]
                if life.stop_by is None and (life.ready_at is None or _runs_again(life)):
                    return life, life.error
            if life.too_slow is not None and (life.over or self._ignores_cancel(life)):
                error, life.too_slow = life.too_slow, None
                return life, error
        return None

    async def _failed(self, life: _Life, error: BaseException | None) -> None:
        """Count a failure; then stop and start again what the strategy says, or give up."""
        now, wait_s, most = trio.current_time(), 0.0, self._tree.restarts_max
        if life.ready_at is None and not self._up:
            if most is not None:
                _raise_start_failed(life, error)  # whoever started the tree must see it
            self._above.tries_again()
        if life.child.restart is Restart.TEMPORARY:
            return  # it could not start, and is not tried again
        if life.ready_at is None or self._tree.backoff.crashes:
            count = self._in_a_row[life.child.name] = self._in_a_row.get(life.child.name, 0) + 1
            wait_s = self._tree.backoff.wait_s(count, self._rng.random())
        self._failures.append(now)
        if most is not None and len(self._failures) > most and now - self._failures[0] <= self._tree.restarts_window_s:
            gave_up = RestartsExceeded(
                f"too many failures ({len(self._failures)} within {self._tree.restarts_window_s:g} s), "
                f"the last that of {life.path}: {error_text(error)}"
            )
            self._happened(self._path, ChildEventKind.GAVE_UP, gave_up)
            raise gave_up from error
        self._happened(life.path, ChildEventKind.RESTARTING, wait_s=wait_s)
        again = self._tree.restarted_with(life.child)
        await self._stop(again)
        for child in again:
            if child.restart is not Restart.TEMPORARY:
                start_at = now + wait_s if wait_s else -inf
                self._to_start[child.name] = max(start_at, self._to_start.get(child.name, -inf))

    def _happened(
        self,
        path: str,
        kind: ChildEventKind,
        error: BaseException | None = None,
        *,
        wait_s: float = 0.0,
        since: float | None = None,
    ) -> None:
        now = trio.current_time()
        self._tell(ChildEvent(path, kind, now, error, wait_s, None if since is None else now - since))


def _completes(life: _Life) -> bool:
    """Whether its tree has done what it was for."""
    return life.child.significant and life.over and life.stop_by is None and life.error is None


def _is_there(life: _Life) -> bool:
    """Whether it is ready, or goes on trying by itself: nobody is to wait for it any longer."""
    return life.ready_at is not None or life.tries_again


def _runs_again(life: _Life) -> bool:
    """Whether a life that is over is to be followed by another; never, if it had been asked to end."""
    restart = life.child.restart
    wanted = restart is Restart.PERMANENT or (restart is Restart.TRANSIENT and life.error is not None)
    return wanted and life.stop_by is None


def _raise_start_failed(life: _Life, error: BaseException | None) -> NoReturn:
    if isinstance(error, StartFailed):
        raise error  # it has its sentence
    raise StartFailed(f"{life.path} could not start: {error_text(error)}") from error


@frozen
class OnStarted:
    """A `trio.TaskStatus` that calls a function when what is started says that it is up."""

    ready: Callable[[], None]

    def started(self, value: object = None) -> None:  # noqa: ARG002  # the shape of Trio's own
        """Call it."""
        self.ready()
