"""One run of one child, in the view of its tree's loop."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio
from attrs import define, field

from protocol.errors import StartFailed

from .tree import Child, Restart, Tree


@define(eq=False)
class Life:
    """One run of one child, from its start to its end; also the child's `task_status`."""

    child: Child | Tree
    path: str
    on_ready: Callable[[Life], None]
    scope: trio.CancelScope = field(factory=lambda: trio.CancelScope(shield=True))
    ended: bool = False
    abandoned_task: bool = False  # a tree that has stopped, except for a task that ignores its cancellation
    started_at: float = field(factory=trio.current_time)
    ready_at: float | None = None
    retries: bool = False  # a tree that never gives up and is not ready
    too_slow: StartFailed | None = None  # a missed start deadline; counts once the life has ended or ignores its cancel
    stopping_at: float | None = None
    stop_by: float | None = None  # None: not asked to stop
    ignores_cancel: bool = False
    error: BaseException | None = None

    def started(self, value: object = None) -> None:  # noqa: ARG002  # Trio's servers pass their listeners
        """Record that the child is ready, unless it was asked to stop before."""
        if self.ready_at is not None:
            raise RuntimeError(f"{self.path} called started() a second time.")
        if self.stop_by is None and not self.ended:
            self.ready_at = trio.current_time()
            self.on_ready(self)

    @property
    def start_by(self) -> float:
        """The start deadline on Trio's clock; infinite for a tree, whose children have their own."""
        pending = isinstance(self.child, Child) and self.ready_at is None and self.stop_by is None
        return self.started_at + self.child.start_within_s if isinstance(self.child, Child) and pending else inf

    @property
    def completes_tree(self) -> bool:
        """Whether a significant child has ended well, so that its tree is complete."""
        return self.child.significant and self.ended and self.stop_by is None and self.error is None

    @property
    def is_settled(self) -> bool:
        """Whether the child is ready, or retries by itself, so that nothing waits for it."""
        return self.ready_at is not None or self.retries

    @property
    def is_restarted(self) -> bool:
        """Whether another life follows; never if the child was asked to stop."""
        restart = self.child.restart
        wanted = restart is Restart.PERMANENT or (restart is Restart.TRANSIENT and self.error is not None)
        return wanted and self.stop_by is None
