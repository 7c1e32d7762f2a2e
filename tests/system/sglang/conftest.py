"""The real engine: once behind a node that clients can reach, and once alone."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from openai import OpenAI

from actors.engines.port import Engine
from actors.engines.sglang import shared_memory
from actors.engines.sglang.spec import SglangSpec
from bench.rig.node import MODEL, ROOT, Node, node, short_folder
from supervisor.engines.sglang import spawn
from supervisor.engines.sglang.engine import HostRuntime, run_engine
from supervisor.processes import run_folder
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from supervisor.supervision.registration import Registration

STARTED_WITHIN_S = 120.0

MakeEngine = Callable[..., AbstractAsyncContextManager[Engine]]  # with changes to its spec


@pytest.fixture(scope="session")
def served() -> Iterator[Node]:
    with short_folder() as folder, node(folder) as running:
        yield running


@pytest.fixture(scope="session")
def client(served: Node) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as stock:
        yield stock


@pytest.fixture
def make_engine() -> MakeEngine:
    return real_engine


Keep = Callable[..., Awaitable[None]]  # an engine, with its registration and changes to its spec


@asynccontextmanager
async def kept_engines(silent_s: float = 10.0) -> AsyncIterator[Keep]:
    """Run a zygote without a node around it; yield a function that keeps an engine forked from it."""
    with short_folder() as base, run_folder.run_folder(base, shared_memory.remove) as folder:
        spec = SglangSpec(MODEL, str(ROOT / "examples" / MODEL), "cpu", slots=16, kv_tokens_max=16384)
        zygotes: Registration[spawn.Zygote] = Registration()
        grace = GracePeriods()

        def output_log(name: str) -> OutputLog:
            return OutputLog(Path(base) / f"{name}.log")

        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["TMPDIR"] = str(base)
        zygote = partial(spawn.zygote, zygotes, output_log("zygote"), grace, Ladder(0.5, 0.5, 1.0), environment)
        runtime = HostRuntime(folder, output_log, grace, Ladder(), time.time, silent_s)

        async def keep(
            registration: Registration[Engine],
            *,
            task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
            **changes: Any,
        ) -> None:
            await run_engine(
                evolve(spec, **changes), spawn.fork_starter(zygotes), registration, runtime, task_status=task_status
            )

        async with trio.open_nursery() as nursery:
            await nursery.start(zygote)
            yield keep
            nursery.cancel_scope.cancel(reason="the test has ended")


@asynccontextmanager
async def real_engine(**changes: object) -> AsyncIterator[Engine]:
    """Run a zygote, and an engine forked from it, without a node around them."""
    engines: Registration[Engine] = Registration()
    async with kept_engines() as keep, trio.open_nursery() as nursery:
        with trio.fail_after(STARTED_WITHIN_S):
            await nursery.start(partial(keep, engines, **changes))
        assert engines.current is not None
        yield engines.current
        nursery.cancel_scope.cancel(reason="the test has ended")
