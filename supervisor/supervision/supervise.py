"""Run a supervision tree: start children after their needs, restart by strategy, stop in reverse.

Why it is written this way:

- Each tree is one loop over two facts: the lives of its children, and the children still to be started. The loop waits
  only for the next change of either. So it looks after every child while some are starting, are too slow, or wait for
  their back-off; only the stop of children that depend on each other is awaited.
- An event is never passed to the loop through a queue, which could lose it. A task sets a flag on its own `Life` and
  wakes the loop, and the loop finds every ended life.
- Only the loop ends a life. Each life has its own cancel scope, shielded from cancellation around it: when the tree
  is cancelled, children still stop one after the other, in the reverse order of their needs.
- Trio cannot kill a task. A child that ignores its cancellation beyond `stop_within_s` is reported and left running,
  and a second life of it is never started beside the first.
- A failure is an exception of a child, an end before readiness, or a missed start deadline. Only this file decides its
  consequences; a failing child reports to no other place.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import NoReturn, Protocol

import trio
from attrs import frozen

from protocol.errors import ActorError, StartFailed

from .events import ChildEvent, ChildEventKind, error_text, is_planned, log_event
from .life import Life
from .tree import Child, Restart, Strategy, Tree

log = logging.getLogger(__name__)


class RestartsExceeded(ActorError):
    """The children of a tree failed more often than it permits; its parent handles the failure."""


class RandomSource(Protocol):
    """A source of random numbers, such as `random.Random`."""

    def random(self) -> float:
        """Return a number from 0 to 1."""


OnEvent = Callable[[ChildEvent], None]


def ignore(event: ChildEvent) -> None:
    """Do nothing with an event."""


async def supervise(
    tree: Tree,
    *,
    rng: RandomSource,
    on_event: OnEvent = ignore,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `tree` until this is cancelled or a significant child has ended well.

    `started()` is called once every child is ready, or retries by itself. `on_event` is called synchronously with each
    event of a child, after its log line; it must not block, and its exceptions are logged and ignored. Raises
    `StartFailed` if the tree does not become ready, and `RestartsExceeded` if it fails too often later.
    """

    def emit(event: ChildEvent) -> None:
        log_event(event)
        try:
            on_event(event)
        except Exception:  # an observer's bug must not end the tree
            log.exception("an observer of the tree failed at: %s", event)

    def ready() -> None:
        task_status.started()

    await _Loop(tree, tree.name, rng, emit, _Parent(ready)).run()


@frozen
class _Parent:
    """The callbacks of a tree's parent."""

    ready: Callable[[], None]
    retries: Callable[[], None] = lambda: None  # the tree is not ready but retries by itself: do not wait for it
    abandoned_task: Callable[[], None] = lambda: None  # the tree has stopped, but for a task that ignores its cancel


class _Loop:
    """The state of one running tree, and the loop that acts on it."""

    _nursery: trio.Nursery

    def __init__(self, tree: Tree, path: str, rng: RandomSource, emit: OnEvent, parent: _Parent) -> None:
        self._tree = tree
        self._path = path
        self._rng = rng
        self._emit = emit
        self._parent = parent
        self._needs = tree.transitive_needs()
        # The two facts of the loop, by child: a life, kept until its end is handled, and the earliest time of a start.
        self._lives: dict[str, Life] = {}
        self._to_start = {child.name: -inf for child in tree.children}
        self._started_once: set[str] = set()
        self._failures: deque[float] = deque(maxlen=(tree.restarts_max or 0) + 1)  # times of the latest failures
        self._failures_in_a_row: dict[str, int] = {}  # by child, for its back-off
        self._ready = False  # every child has been ready, or retries by itself
        self._changed = trio.Event()  # replaced in each pass; set when any life changes

    async def run(self) -> None:
        """Run until cancelled, complete or given up; then stop all children."""
        gave_up: ActorError | None = None
        async with trio.open_nursery() as self._nursery:
            try:
                await self._react()
            except ActorError as error:
                gave_up = error  # raised below, outside of the nursery, which would wrap it in a group
            finally:
                with trio.CancelScope(shield=True):  # bounded: each child has its own deadline
                    await self._stop(self._tree.children)
                if not all(life.ended for life in self._lives.values()):
                    self._parent.abandoned_task()
        if gave_up is not None:
            raise gave_up

    async def _react(self) -> None:
        """Handle failures, start children, and wait for the next change."""
        while True:
            await trio.lowlevel.checkpoint()  # start nothing if the tree has been cancelled
            if any(life.completes_tree for life in self._lives.values()):
                break
            if (failure := self._next_failure()) is not None:
                await self._handle_failure(*failure)
                continue
            self._changed = trio.Event()
            next_start_at = self._start_children()
            if not self._ready and not self._to_start and all(life.is_settled for life in self._lives.values()):
                self._ready = True
                self._parent.ready()
            with trio.move_on_at(min(next_start_at, self._next_deadline())):
                await self._changed.wait()
        if not self._ready:
            self._parent.ready()  # it was complete before all children were ready

    # Stopping ----------------------------------------------------------------------------

    async def _stop(self, children: tuple[Child | Tree, ...]) -> None:
        """Stop `children`, each after its dependents."""
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
            deadlines = [life.stop_by for life in lives if life.stop_by is not None and not life.ignores_cancel]
            with trio.move_on_at(min(deadlines, default=inf)):
                await self._changed.wait()

    def _is_stopped(self, life: Life) -> bool:
        """Cancel a life once, and return whether there is nothing left to wait for."""
        if life.ended:
            del self._lives[life.child.name]
            return True
        self._cancel(life)
        return life.abandoned_task or self._ignores_cancel(life)

    def _cancel(self, life: Life) -> None:
        if life.stop_by is None:
            within_s = life.child.stop_within_s if isinstance(life.child, Child) else inf  # its children have theirs
            life.stopping_at = trio.current_time()
            life.stop_by = life.stopping_at + within_s
            self._report(life.path, ChildEventKind.STOPPING)
            life.scope.cancel(reason="stopped by its supervisor")

    def _ignores_cancel(self, life: Life) -> bool:
        """Return whether a life has missed its stop deadline, and report the first miss."""
        if not life.ignores_cancel and life.stop_by is not None and trio.current_time() >= life.stop_by:
            life.ignores_cancel = True
            self._report(life.path, ChildEventKind.IGNORES_CANCEL)
        return life.ignores_cancel

    # Starting ----------------------------------------------------------------------------

    def _start_children(self) -> float:
        """Start the children that may start now, and return the time of the next start."""
        next_start_at, now = inf, trio.current_time()
        for child in self._tree.children:
            if child.name in self._to_start and child.name not in self._lives and self._may_start(child):
                if (start_at := self._to_start[child.name]) > now:
                    next_start_at = min(next_start_at, start_at)
                    continue
                del self._to_start[child.name]
                self._started_once.add(child.name)
                life = self._lives[child.name] = Life(child, f"{self._path}/{child.name}", self._on_ready)
                self._report(life.path, ChildEventKind.STARTING)
                self._nursery.start_soon(self._run_life, life, name=life.path)
        return next_start_at

    def _may_start(self, child: Child | Tree) -> bool:
        """Return whether all needs of a child are ready or will not run again; a one-for-one restart has none."""
        if self._tree.strategy is Strategy.ONE_FOR_ONE and child.name in self._started_once:
            return True
        lives = (self._lives.get(name) for name in self._needs[child.name])
        missing = self._needs[child.name] & self._to_start.keys()
        return not missing and all(life is None or life.ended or life.is_settled for life in lives)

    def _next_deadline(self) -> float:
        """Return the next start deadline, or the stop deadline of a life that missed its start deadline."""
        lives = self._lives.values()
        too_slow = (life.stop_by for life in lives if life.too_slow is not None and life.stop_by is not None)
        return min((*(life.start_by for life in lives), *too_slow), default=inf)

    async def _run_life(self, life: Life) -> None:
        child = life.child
        try:
            with life.scope:
                if isinstance(child, Tree):
                    parent = _Parent(life.started, partial(self._on_retries, life), partial(self._on_abandoned, life))
                    await _Loop(child, life.path, self._rng, self._emit, parent).run()
                else:
                    await child.run(*child.args, task_status=life)
        except Exception as error:  # noqa: BLE001  # any failure of a child is the loop's to handle
            life.error = error
        except BaseException as error:  # KeyboardInterrupt and the like end more than this tree
            life.error = error
            raise
        finally:
            self._on_ended(life)

    # Changes of lives, from their own tasks ----------------------------------------------

    def _on_ready(self, life: Life) -> None:
        self._report(life.path, ChildEventKind.STARTED, since=life.started_at)
        self._changed.set()

    def _on_retries(self, life: Life) -> None:
        life.retries = True
        self._changed.set()

    def _on_abandoned(self, life: Life) -> None:
        life.abandoned_task = True
        self._changed.set()

    def _on_ended(self, life: Life) -> None:
        if life.stop_by is not None:
            kind = ChildEventKind.STOPPED
        elif life.ready_at is None and life.error is None:
            kind, life.error = ChildEventKind.FAILED, StartFailed(f"{life.path} ended before it was ready.")
        else:
            ended = life.error is None or is_planned(life.error)
            kind = ChildEventKind.ENDED if ended else ChildEventKind.FAILED
        if life.ready_at is not None and trio.current_time() - life.ready_at >= self._tree.backoff.reset_after_s:
            self._failures_in_a_row.pop(life.child.name, None)
        self._report(life.path, kind, life.error, since=life.stopping_at)
        life.ended = True
        self._changed.set()

    # Failures ----------------------------------------------------------------------------

    def _next_failure(self) -> tuple[Life, BaseException | None] | None:
        """Return the first life that has failed or is to be restarted, with its error; forget ended lives.

        A life with a missed start deadline is cancelled here, and returned once it has ended or ignores its cancel.
        """
        for child in self._tree.children:
            life = self._lives.get(child.name)
            if life is None:
                continue
            if trio.current_time() >= life.start_by and not life.ended:
                within_s = life.start_by - life.started_at
                life.too_slow = StartFailed(f"{life.path} was not ready within {within_s:g} s.")
                self._report(life.path, ChildEventKind.FAILED, life.too_slow)
                self._cancel(life)
            if life.ended:
                del self._lives[child.name]
                if life.stop_by is None and (life.ready_at is None or life.is_restarted):
                    return life, life.error
            if life.too_slow is not None and (life.ended or self._ignores_cancel(life)):
                error, life.too_slow = life.too_slow, None
                return life, error
        return None

    async def _handle_failure(self, life: Life, error: BaseException | None) -> None:
        """Count a failure; then stop and restart children by the strategy, or give up."""
        now, wait_s, limit = trio.current_time(), 0.0, self._tree.restarts_max
        if life.ready_at is None and not self._ready:
            if limit is not None:
                _raise_start_failed(life, error)  # a failed first start is an error of the tree's own start
            self._parent.retries()
        if life.child.restart is Restart.TEMPORARY:
            return  # it could not start, and is not tried again
        if life.ready_at is None or self._tree.backoff.crashes:
            count = self._failures_in_a_row[life.child.name] = self._failures_in_a_row.get(life.child.name, 0) + 1
            wait_s = self._tree.backoff.wait_s(count, self._rng.random())
        self._failures.append(now)
        window_s = self._tree.restarts_window_s
        if limit is not None and len(self._failures) > limit and now - self._failures[0] <= window_s:
            gave_up = RestartsExceeded(
                f"too many failures ({len(self._failures)} within {window_s:g} s), "
                f"the last that of {life.path}: {error_text(error)}"
            )
            self._report(self._path, ChildEventKind.GAVE_UP, gave_up)
            raise gave_up from error
        self._report(life.path, ChildEventKind.RESTARTING, wait_s=wait_s)
        restarted = self._tree.restarted_with(life.child)
        await self._stop(restarted)
        for child in restarted:
            if child.restart is not Restart.TEMPORARY:
                start_at = now + wait_s if wait_s else -inf
                self._to_start[child.name] = max(start_at, self._to_start.get(child.name, -inf))

    def _report(
        self,
        path: str,
        kind: ChildEventKind,
        error: BaseException | None = None,
        *,
        wait_s: float = 0.0,
        since: float | None = None,
    ) -> None:
        now = trio.current_time()
        self._emit(ChildEvent(path, kind, now, error, wait_s, None if since is None else now - since))


def _raise_start_failed(life: Life, error: BaseException | None) -> NoReturn:
    if isinstance(error, StartFailed):
        raise error  # its sentence has the name and the reason already
    raise StartFailed(f"{life.path} could not start: {error_text(error)}") from error


@frozen
class OnStarted:
    """A `trio.TaskStatus` that calls `callback` when `started()` is called."""

    callback: Callable[[], None]

    def started(self, value: object = None) -> None:  # noqa: ARG002  # the signature of Trio's own
        """Call the callback."""
        self.callback()
