"""The cost of a turn of the event loop in the simulator, in function calls, since a clock would never repeat itself.

A call of a function costs one, be it Python's own, a library's or one of C; what the simulator itself does in the same
turn, as a network or an engine, and all that it calls, costs nothing. Everything in a seed is small: prompts, answers,
clients. So the budget is a fifth of what a turn may take on a machine, and what grows with the square of anything exceeds it
long before. Every eighth seed is counted, at twice its time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import CodeType, FrameType

import trio

from protocol.dialects.chat import ChatRequest
from protocol.dialects.completions import CompletionRequest
from protocol.dialects.responses import Create, CreateHttp
from protocol.strict.mistakes import Mistakes
from protocol.strict.structure import structure
from supervisor.telemetry.loop_monitor import task_function
from tests.rig.turns import ROOT, is_product

COST_MAX = 10_000  # of one turn, some 4 ms: a call takes 0.4 microseconds, with all that is done between two of them
COUNTED_EVERY = 8  # seeds
OURS = str(ROOT / "tests")


@cache
def warm() -> None:
    """Fill the caches that the first request of each kind fills, so that no seed pays for them."""
    for kind in (ChatRequest, CompletionRequest, Create, CreateHttp):
        with suppress(Mistakes):
            structure({}, kind)


class TurnTooLong(AssertionError):
    """A task of the product did too much in one turn of the event loop."""


class Costs(trio.abc.Instrument):
    """Counts the calls of each step of the product's tasks, and keeps the maximum of each function."""

    def __init__(self) -> None:
        self.dearest: dict[str, int] = {}
        self._free: dict[int, bool] = {}  # whether it is the simulator's, by the id of a function's code
        self._codes: list[CodeType] = []  # so that no id is used twice
        self._spent: Callable[[], int] = int

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not is_product(task):
            return
        spent, inside, free, is_free = 0, 1, self._free, self._is_free  # this function's own return comes first

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal spent, inside
            if event == "c_call":
                spent += not inside
            elif event in {"call", "return"}:
                code = frame.f_code
                cached = free.get(id(code))
                if is_free(code) if cached is None else cached:
                    inside += 1 if event == "call" else -1
                elif event == "call":
                    spent += not inside

        self._spent = lambda: spent
        sys.setprofile(count)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        sys.setprofile(None)
        spent, self._spent = self._spent(), int
        if spent:
            name = task_function(task)
            self.dearest[name] = max(spent, self.dearest.get(name, 0))

    def check(self, cost_max: int = COST_MAX) -> None:
        """Raise `TurnTooLong` if any turn cost more than it may."""
        dear = {name: cost for name, cost in self.dearest.items() if cost > cost_max}
        if dear:
            raise TurnTooLong(f"calls in one turn, of which there may be {cost_max:,}: {dear}")

    def _is_free(self, code: CodeType) -> bool:
        self._codes.append(code)
        self._free[id(code)] = code.co_filename.startswith(OURS)
        return self._free[id(code)]
