"""One run of one child, as its tree's loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio
from attrs import define, field

from protocol.errors import StartFailed

from .tree import Child, Restart, Tree


@define(eq=False)
class Life:
    """One run of one child, from its start to its end; also the `task_status` that is passed to the child."""

    child: Child | Tree
    path: str
    on_ready: Callable[[Life], None]
    scope: trio.CancelScope = field(factory=lambda: trio.CancelScope(shield=True))
    ended: bool = False
    abandoned_task: bool = False  # a tree that has stopped, except for a task that ignores its cancellation
    started_at: float = field(factory=trio.current_time)
    ready_at: float | None = None
    retries: bool = False  # a tree that never gives up, and that is not ready
    too_slow: StartFailed | None = None  # set when it missed its start deadline; counts once it has ended or ignored it
    stopping_at: float | None = None
    stop_by: float | None = None  # None: it has not been asked to stop
    ignores_cancel: bool = False
    error: BaseException | None = None

    def started(self, value: object = None) -> None:  # noqa: ARG002  # Trio's servers pass their listeners
        """Note that the child is ready; ignored if it comes after the child was asked to stop."""
        if self.ready_at is not None:
            raise RuntimeError(f"{self.path} called started() a second time.")
        if self.stop_by is None and not self.ended:
            self.ready_at = trio.current_time()
            self.on_ready(self)

    @property
    def start_by(self) -> float:
        """The start deadline on Trio's clock, infinite if none applies: the children of a tree have their own."""
        pending = isinstance(self.child, Child) and self.ready_at is None and self.stop_by is None
        return self.started_at + self.child.start_within_s if isinstance(self.child, Child) and pending else inf

    @property
    def completes_tree(self) -> bool:
        """Whether it is a significant child that has ended well, so that its tree is complete."""
        return self.child.significant and self.ended and self.stop_by is None and self.error is None

    @property
    def is_settled(self) -> bool:
        """Whether it is ready, or retries by itself so that nothing waits for it."""
        return self.ready_at is not None or self.retries

    @property
    def is_restarted(self) -> bool:
        """Whether it is followed by another life once it has ended; never if it was asked to stop."""
        restart = self.child.restart
        wanted = restart is Restart.PERMANENT or (restart is Restart.TRANSIENT and self.error is not None)
        return wanted and self.stop_by is None
