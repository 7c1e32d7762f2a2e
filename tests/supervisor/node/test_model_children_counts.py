"""What a plain request costs between the gateway and an engine, in counts, which repeat exactly, unlike times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.routing.load import Load
from protocol.messages.text import Respond, Role, Turn
from supervisor.cluster import in_flight
from supervisor.gateway.request_record import RequestRecord
from supervisor.node.assembly import Assembly
from tests.supervisor.config.test_load import Written
from tests.supervisor.engines.test_children_ranks import running

ROOT = Path(__file__).parents[3]
CLUSTER = f"""
[gateway]
port = 0
[model.tiny]
path = "{ROOT / "examples" / "tiny"}"
[engine.only]
model = "tiny"
kind = "simulated"
slots = 16
kv_tokens_max = 100_000
context_max = 8192
"""
TASKS_MAX = 1  # decode's: the processor and the router answer in the asker's
SCOPES_MAX = 10  # those of the engine's publisher among them
STEPS_MAX = 21  # of tasks, those of the simulated engine and of its publisher among them
LOADS_MAX = 5  # of a worker, which are dear to make: its name alone needs none


@define(eq=False)
class Counts(trio.abc.Instrument):
    """Counts tasks that begin, steps of tasks, cancel scopes that are entered, and loads of workers that are made."""

    tasks: int = 0
    steps: int = 0
    scopes: int = 0
    loads: int = 0

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.tasks += 1

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    counts, enter = Counts(), trio.CancelScope.__enter__

    def count_and_make(**values: Any) -> Load:
        counts.loads += 1
        return Load(**values)

    def count_and_enter(scope: trio.CancelScope) -> trio.CancelScope:
        counts.scopes += 1
        return enter(scope)

    with monkeypatch.context() as patches:
        patches.setattr(trio.CancelScope, "__enter__", count_and_enter)
        patches.setattr(in_flight, "Load", count_and_make)
        trio.lowlevel.add_instrument(counts)
        yield counts
        trio.lowlevel.remove_instrument(counts)


async def answer(assembly: Assembly, number: int) -> None:
    assert assembly.gateway is not None
    request = Respond(f"{number << 16:032x}", (Turn(Role.USER, "an oak"),), tokens_max=1, ignore_eos=True)
    record = RequestRecord(request.id, "tiny", "chat", trio.current_time())
    served = assembly.gateway.runner.served["tiny"]
    await assembly.gateway.answer(request, served, record, lambda _: None, lambda answered: answered)


async def test_a_plain_request_costs_one_task_and_few_scopes_and_steps(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, written: Written
) -> None:
    async with running(written, CLUSTER) as (assembly, _):
        for number in range(3):  # the first ones fill caches
            await answer(assembly, 1 + number)
            await wait_all_tasks_blocked()
        with counted(monkeypatch) as counts:
            for number in range(20):
                await answer(assembly, 10 + number)
        assert counts.tasks <= 20 * TASKS_MAX
        assert counts.scopes <= 20 * SCOPES_MAX
        assert counts.steps <= 20 * STEPS_MAX
        assert 0 < counts.loads <= 20 * LOADS_MAX
