"""Run a tree: start in order, watch, restart by strategy, stop in reverse.

The loop acts on two facts: which lives there are, and which children are still to be started. A life that has ended is
found among the first, so none is lost while the loop waits for something else; and no child is started beside a life of
its own that will not end. Only the loop ends a life: each has its own scope, shielded from what is cancelled around it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NoReturn, Protocol

import trio
from attrs import define, field, frozen

from protocol.errors import ActorError, StartFailed

from .happenings import Happening, Kind, record, words
from .tree import Child, Restart, Strategy, Tree

log = logging.getLogger(__name__)


class RestartsExceeded(ActorError):
    """The children of a tree failed more often than it allows; the tree above decides what follows."""


class Chance(Protocol):
    """Where chance comes from; a `random.Random` will do."""

    def random(self) -> float:
        """Return a number from 0 to 1."""


_Tell = Callable[[Happening], None]


def nothing(happening: Happening) -> None:
    """Watch without looking."""


async def supervise(
    tree: Tree,
    *,
    rng: Chance,
    watch: Callable[[Happening], None] = nothing,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep `tree` alive until this is cancelled, or until a significant child has done its work.

    Raises `StartFailed` if the tree does not come up, and `RestartsExceeded` if it does not stay up. `watch` sees each
    happening as it happens and must neither wait nor raise; each is logged besides.
    """

    def tell(happening: Happening) -> None:
        record(happening)
        try:
            watch(happening)
        except Exception:  # a tree must not fall because of who looks at it
            log.exception("Whoever watches the tree failed at: %s", happening)

    def is_up() -> None:
        task_status.started()

    await _Loop(tree, tree.name, rng, tell, trio.Event()).supervise(is_up)


@define(eq=False)
class _Life:
    """One life of one child, and the `task_status` that the child gets for it."""

    child: Child | Tree
    path: str
    is_ready: Callable[[_Life], None]
    scope: trio.CancelScope = field(factory=lambda: trio.CancelScope(shield=True))
    over: trio.Event = field(factory=trio.Event)
    let_go: trio.Event = field(factory=trio.Event)  # it is over, or a tree that had to leave something behind
    begun_at: float = field(factory=trio.current_time)
    ready_at: float | None = None
    stopping_at: float | None = None
    stop_by: float | None = None  # None: nobody has asked it to end
    deaf: bool = False
    error: BaseException | None = None

    def started(self, value: object = None) -> None:  # noqa: ARG002  # Trio's servers pass their listeners
        """Note that the child is ready to serve."""
        if self.ready_at is not None:
            raise RuntimeError(f"{self.path} called started() a second time.")
        if self.stop_by is None and not self.over.is_set():  # else it comes too late
            self.ready_at = trio.current_time()
            self.is_ready(self)


class _Loop:
    """What one tree knows about its children while it runs."""

    _nursery: trio.Nursery

    def __init__(self, tree: Tree, path: str, rng: Chance, tell: _Tell, let_go: trio.Event) -> None:
        self._tree = tree
        self._path = path
        self._rng = rng
        self._tell = tell
        self._let_go = let_go
        self._lives: dict[str, _Life] = {}  # all that are not known to be over
        self._to_start = {child.name: -inf for child in tree.children}  # and not before when
        self._failures: deque[float] = deque(maxlen=tree.restarts_max + 1)  # when the last of them were
        self._failed_starts: dict[str, int] = {}  # how many in a row
        self._up = False  # every child has been ready
        self._changed = trio.Event()  # a life has become ready, or is over

    async def supervise(self, is_up: Callable[[], None]) -> None:
        """Run until cancelled, done or given up, and then stop."""
        gave_up: ActorError | None = None
        async with trio.open_nursery() as self._nursery:
            try:
                await self._run(is_up)
            except ActorError as error:
                gave_up = error  # raised below: here, the nursery would wrap it in a group
            finally:
                with trio.CancelScope(shield=True):  # its deadlines are those of the children
                    await self._stop(self._tree.children)
                if not all(life.over.is_set() for life in self._lives.values()):
                    self._let_go.set()
        if gave_up is not None:
            raise gave_up

    async def _run(self, is_up: Callable[[], None]) -> None:
        """React to what has ended, start what is to be started, and wait for the next of either."""
        while True:
            await trio.lowlevel.checkpoint()  # start nothing for a tree that is to stop
            if any(_completes(life) for life in self._lives.values()):
                break
            if (life := self._ended_by_itself()) is not None:
                if life.ready_at is None or _runs_again(life):
                    await self._failed(life, life.error)
                continue
            child = self._next_to_start()
            start_at = inf if child is None else self._to_start[child.name]
            if child is not None and start_at <= trio.current_time():
                await self._start(child)
                continue
            if not self._up and not self._to_start:
                self._up = True
                is_up()
            self._changed = trio.Event()
            with trio.move_on_at(start_at):
                await self._changed.wait()
        if not self._up:
            is_up()  # its work was done before all were up

    async def _stop(self, children: tuple[Child | Tree, ...]) -> None:
        """End the lives of `children`, from the last to the first, each within its deadline."""
        for child in reversed(children):
            life = self._lives.get(child.name)
            if life is None:
                continue
            if life.stop_by is None and not life.over.is_set():
                within_s = child.stop_within_s if isinstance(child, Child) else inf  # its children have theirs
                life.stopping_at = trio.current_time()
                life.stop_by = life.stopping_at + within_s
                self._happened(life.path, Kind.STOPPING)
                life.scope.cancel(reason="stopped by its supervisor")
            with trio.move_on_at(inf if life.stop_by is None else life.stop_by):
                await life.let_go.wait()
            if life.over.is_set():
                del self._lives[child.name]
            elif isinstance(child, Child) and not life.deaf:  # a tree has said which child of it is to blame
                life.deaf = True
                self._happened(life.path, Kind.IGNORES_CANCEL)

    def _ended_by_itself(self) -> _Life | None:
        """Forget lives that are over, up to the first that nobody had asked to end.

        The first among the children, not in time: those after it may have fallen only because it fell.
        """
        for child in self._tree.children:
            life = self._lives.get(child.name)
            if life is not None and life.over.is_set():
                del self._lives[child.name]
                if life.stop_by is None:
                    return life
        return None

    def _next_to_start(self) -> Child | Tree | None:
        waiting = [child for child in self._tree.children if child.name in self._to_start]
        if self._tree.strategy is not Strategy.ONE_FOR_ONE:
            del waiting[1:]  # they may need the first
        free = [child for child in waiting if child.name not in self._lives]
        return min(free, key=lambda child: self._to_start[child.name], default=None)

    async def _start(self, child: Child | Tree) -> None:
        """Begin a life, and return when it is ready, over, or in vain; one that is too slow has failed."""
        del self._to_start[child.name]
        life = self._lives[child.name] = _Life(child, f"{self._path}/{child.name}", self._is_ready)
        self._happened(life.path, Kind.STARTING)
        self._nursery.start_soon(self._live, life, name=life.path)
        patience_s = child.start_within_s if isinstance(child, Child) else inf  # its children have theirs
        with trio.move_on_after(patience_s):
            while not self._settled(life):
                self._changed = trio.Event()
                await self._changed.wait()
        if not self._settled(life):
            error = StartFailed(f"{life.path} was not ready within {patience_s:g} s.")
            self._happened(life.path, Kind.FAILED, error)
            await self._stop((child,))
            await self._failed(life, error)

    def _settled(self, life: _Life) -> bool:
        """Whether nothing is left to wait for: what the child needs may have failed, or all work may be done."""
        if life.ready_at is not None or life.over.is_set():
            return True
        alone = self._tree.strategy is Strategy.ONE_FOR_ONE
        over = [other for other in self._lives.values() if other.over.is_set()]
        return any(_completes(other) or (not alone and _runs_again(other)) for other in over)

    async def _live(self, life: _Life) -> None:
        child = life.child
        try:
            with life.scope:
                if isinstance(child, Tree):
                    await _Loop(child, life.path, self._rng, self._tell, life.let_go).supervise(life.started)
                else:
                    await child.run(*child.args, task_status=life)
        except Exception as error:  # noqa: BLE001  # whatever it is, the loop decides what follows
            life.error = error
        except BaseException as error:  # KeyboardInterrupt and its like end more than this tree
            life.error = error
            raise
        finally:
            self._is_over(life)

    def _is_ready(self, life: _Life) -> None:
        self._happened(life.path, Kind.STARTED, since=life.begun_at)
        self._changed.set()

    def _is_over(self, life: _Life) -> None:
        if life.stop_by is not None:
            kind = Kind.STOPPED
        elif life.ready_at is None and life.error is None:
            kind, life.error = Kind.FAILED, StartFailed(f"{life.path} ended before it was ready.")
        else:
            kind = Kind.ENDED if life.error is None else Kind.FAILED
        if life.ready_at is not None and trio.current_time() - life.ready_at >= self._tree.backoff.reset_after_s:
            self._failed_starts.pop(life.child.name, None)
        self._happened(life.path, kind, life.error, since=life.stopping_at)
        life.over.set()
        life.let_go.set()
        self._changed.set()

    async def _failed(self, life: _Life, error: BaseException | None) -> None:
        """Count a failure; then stop and start again what the strategy says, or give up."""
        now, wait_s = trio.current_time(), 0.0
        if life.ready_at is None:
            if not self._up:
                _raise_start_failed(life, error)  # whoever started the tree must see it
            count = self._failed_starts[life.child.name] = self._failed_starts.get(life.child.name, 0) + 1
            wait_s = self._tree.backoff.wait_s(count, self._rng.random())
        self._failures.append(now)
        if len(self._failures) > self._tree.restarts_max and now - self._failures[0] <= self._tree.restarts_window_s:
            gave_up = RestartsExceeded(
                f"too many failures ({len(self._failures)} within {self._tree.restarts_window_s:g} s), "
                f"the last that of {life.path}: {words(error)}"
            )
            self._happened(self._path, Kind.GAVE_UP, gave_up)
            raise gave_up from error
        self._happened(life.path, Kind.RESTARTING, wait_s=wait_s)
        again = self._tree.restarted_with(life.child)
        await self._stop(again)
        for child in again:
            if child.restart is not Restart.TEMPORARY:
                start_at = now + wait_s if wait_s else -inf
                self._to_start[child.name] = max(start_at, self._to_start.get(child.name, -inf))

    def _happened(
        self,
        path: str,
        kind: Kind,
        error: BaseException | None = None,
        *,
        wait_s: float = 0.0,
        since: float | None = None,
    ) -> None:
        now = trio.current_time()
        self._tell(Happening(path, kind, now, error, wait_s, None if since is None else now - since))


def _completes(life: _Life) -> bool:
    """Whether its tree has done what it was for."""
    return life.child.significant and life.over.is_set() and life.stop_by is None and life.error is None


def _runs_again(life: _Life) -> bool:
    """Whether a life that is over is to be followed by another; never, if it had been asked to end."""
    restart = life.child.restart
    wanted = restart is Restart.PERMANENT or (restart is Restart.TRANSIENT and life.error is not None)
    return wanted and life.stop_by is None


def _raise_start_failed(life: _Life, error: BaseException | None) -> NoReturn:
    if isinstance(error, StartFailed):
        raise error  # it has its sentence
    raise StartFailed(f"{life.path} could not start: {words(error)}") from error


@frozen
class Up:
    """A `trio.TaskStatus` that calls a function when what is started says that it is up."""

    ready: Callable[[], None]

    def started(self, value: object = None) -> None:  # noqa: ARG002  # the shape of Trio's own
        """Call it."""
        self.ready()
