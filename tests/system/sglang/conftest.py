"""The real engine: once behind a node that clients can reach, and once alone."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve, frozen
from openai import OpenAI

from actors.engines import leftover_memory
from actors.engines.embedding.port import Embedder
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.engines.sglang.spec import SglangSpec
from bench.rig.node import MODEL, ROOT, SGLANG, Node, node, short_folder
from protocol.messages.cluster import Leg
from supervisor.engines.host.life import HostRuntime
from supervisor.engines.sglang import spawn
from supervisor.engines.sglang.engine import run_embedder, run_encoder, run_engine
from supervisor.processes import run_folder
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from supervisor.supervision.registration import Registration
from tests.rig.random_vision_models import FAMILIES

STARTED_WITHIN_S = 300.0
RUNS_AHEAD = "settings.disable_overlap_schedule = false\n"
"""A line for an engine whose scheduler runs a step ahead, as it does by default on a GPU."""

LATEST, *OLDER = reversed(FAMILIES)
EACH_FAMILY = pytest.mark.parametrize(
    "family", [LATEST, *(pytest.param(family, marks=pytest.mark.nightly) for family in OLDER)]
)
"""Run a test with a model of the latest family of vision models, and in the night with one of each."""

MakeEngine = Callable[..., AbstractAsyncContextManager[Engine]]  # with changes to its spec
MakeEncoder = Callable[..., AbstractAsyncContextManager[Encoder]]  # with changes to its spec
MakeEmbedder = Callable[..., AbstractAsyncContextManager[Embedder]]  # with changes to its spec


@pytest.fixture(scope="session")
def served() -> Iterator[Node]:
    with short_folder() as folder, node(folder, engine=SGLANG + RUNS_AHEAD) as running:
        yield running


@pytest.fixture(scope="session")
def client(served: Node) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as stock:
        yield stock


@pytest.fixture(scope="session")
def zygote() -> Iterator[ZygoteProcess]:
    """A zygote without a node, which all tests of this run share: its imports take longer than a test."""
    with short_folder() as folder, running_zygote(folder) as process:
        yield process


Keep = Callable[..., Awaitable[None]]  # an engine, with its registration and changes to its spec
KeepEngines = Callable[..., AbstractAsyncContextManager[Keep]]


@pytest.fixture
def keep_engines(zygote: ZygoteProcess) -> KeepEngines:
    return partial(kept_engines, zygote)


@pytest.fixture
def make_engine(zygote: ZygoteProcess) -> MakeEngine:
    return partial(real_engine, zygote)


@pytest.fixture
def make_encoder(zygote: ZygoteProcess) -> MakeEncoder:
    return partial(real_encoder, zygote)


@pytest.fixture
def make_embedder(zygote: ZygoteProcess) -> MakeEmbedder:
    return partial(real_embedder, zygote)


@frozen
class ZygoteProcess:
    """A zygote's process, and the control socket by which each test uses it in turn."""

    pid: int
    control: socket.socket


@contextmanager
def running_zygote(folder: Path) -> Iterator[ZygoteProcess]:
    """Run a zygote as a node does, but for every `trio.run` of the body; it and its hosts write below `folder`."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment = spawn.host_environment(inherited | {"TMPDIR": str(folder)}, "cpu")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, (folder / "zygote.log").open("wb") as output:
        with theirs:
            process = subprocess.Popen(
                [*spawn.ZYGOTE_COMMAND, str(theirs.fileno()), str(os.getpid())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            ours.settimeout(STARTED_WITHIN_S)
            assert ours.recv(spawn.ANSWER_BYTES), (folder / "zygote.log").read_text()
            yield ZygoteProcess(process.pid, ours)
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def forked_hosts(
    zygote: ZygoteProcess, silent_s: float = 10.0
) -> AsyncIterator[tuple[spawn.HostStarter, HostRuntime]]:
    """Yield how hosts are forked from a zygote, without a node around them."""
    with short_folder() as base, run_folder.run_folder(base, leftover_memory.remove) as folder:
        zygotes: Registration[spawn.Zygote] = Registration()

        def output_log(name: str) -> OutputLog:
            return OutputLog(Path(base) / f"{name}.log")

        runtime = HostRuntime(folder, output_log, GracePeriods(), Ladder(), time.time, silent_s)
        with (
            trio.socket.from_stdlib_socket(zygote.control.dup()) as control,
            zygotes.publish(spawn.Zygote(control, trio.Lock(), trio.CancelScope())),
        ):
            yield spawn.fork_starter(zygotes), runtime


@asynccontextmanager
async def kept_engines(zygote: ZygoteProcess, silent_s: float = 10.0) -> AsyncIterator[Keep]:
    """Yield a function that keeps an engine forked from a zygote, without a node around it."""
    spec = SglangSpec(MODEL, str(ROOT / "examples" / MODEL), "cpu", slots=16, kv_tokens_max=16384)
    async with forked_hosts(zygote, silent_s) as (start_host, runtime):

        async def keep(
            registration: Registration[Engine],
            *,
            task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
            **changes: Any,
        ) -> None:
            await run_engine(evolve(spec, **changes), start_host, registration, runtime, task_status=task_status)

        yield keep


@asynccontextmanager
async def real_engine(zygote: ZygoteProcess, **changes: object) -> AsyncIterator[Engine]:
    """Run an engine forked from a zygote, without a node around it."""
    engines: Registration[Engine] = Registration()
    async with kept_engines(zygote) as keep, trio.open_nursery() as nursery:
        with trio.fail_after(STARTED_WITHIN_S):
            await nursery.start(partial(keep, engines, **changes))
        assert engines.current is not None
        yield engines.current
        nursery.cancel_scope.cancel(reason="the test has ended")


@asynccontextmanager
async def real_encoder(zygote: ZygoteProcess, silent_s: float = 10.0, **changes: Any) -> AsyncIterator[Encoder]:
    """Run an encoder forked from a zygote, without a node around it."""
    encoders: Registration[Encoder] = Registration()
    spec = evolve(SglangSpec("eyes", "", "cpu", slots=16, kv_tokens_max=0, leg=Leg.ENCODE, batch_max=8), **changes)
    async with forked_hosts(zygote, silent_s) as (start_host, runtime), trio.open_nursery() as nursery:
        with trio.fail_after(STARTED_WITHIN_S):
            await nursery.start(run_encoder, spec, start_host, encoders, runtime)
        assert encoders.current is not None
        yield encoders.current
        nursery.cancel_scope.cancel(reason="the test has ended")


@asynccontextmanager
async def real_embedder(zygote: ZygoteProcess, silent_s: float = 10.0, **changes: Any) -> AsyncIterator[Embedder]:
    """Run an embedder forked from a zygote, without a node around it."""
    embedders: Registration[Embedder] = Registration()
    spec = SglangSpec("vectors", "", "cpu", slots=16, kv_tokens_max=16384, leg=Leg.EMBED, task="embed")
    async with forked_hosts(zygote, silent_s) as (start_host, runtime), trio.open_nursery() as nursery:
        with trio.fail_after(STARTED_WITHIN_S):
            await nursery.start(run_embedder, evolve(spec, **changes), start_host, embedders, runtime)
        assert embedders.current is not None
        yield embedders.current
        nursery.cancel_scope.cancel(reason="the test has ended")
