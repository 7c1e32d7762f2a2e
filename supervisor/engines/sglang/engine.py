"""One SGLang engine as a child of the tree: the life of its host, and the port that it publishes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import trio
from attrs import evolve

from actors.engines.embedding.port import Embedder
from actors.engines.encoding.port import Encoder
from actors.engines.hosted_encoder import HostedEncoder
from actors.engines.port import Engine
from actors.engines.sglang import boot_message
from actors.engines.sglang.adapter import SglangEngine
from actors.engines.sglang.embedder import SglangEmbedder
from actors.engines.sglang.spec import SglangSpec
from protocol.errors import EngineLost
from supervisor.engines.file_adapters import with_loaded
from supervisor.engines.host.life import HostRuntime, Use, engine_info, run_host, watched
from supervisor.engines.host.spawn import Descriptors
from supervisor.engines.sglang.spawn import HostStarter
from supervisor.links.link import Link
from supervisor.processes.process import Process
from supervisor.supervision.registration import Registration

UNEXPLAINED = ("RuntimeError: Initialization failed", "RuntimeError: Rank")
"""The beginnings of SGLang's errors about an error of another process, which is in the log."""


async def run_engine(
    spec: SglangSpec,
    start_host: HostStarter,
    registration: Registration[Engine],
    runtime: HostRuntime,
    port: int | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one engine, with the bootstrap port `port` if it is a prefill; `started()` means that it can be asked.

    Raises `StartFailed` if it cannot become ready, `EngineDied` when its process or its link ends later.
    """

    async def offer(link: Link, process: Process) -> str | None:
        with suppress(EngineLost):
            offered = SglangEngine(link, await engine_info(link))
            with registration.publish(offered):
                task_status.started()
                return await watched(offered, process, runtime.silent_s)
        return None

    own = evolve(spec, bootstrap_port=port, adapters=with_loaded(spec.adapters, registration.last))
    await _host(own, start_host, runtime, offer)


async def run_follower_host(spec: SglangSpec, start_host: HostStarter, runtime: HostRuntime, port: int | None) -> None:
    """Run the host of a rank other than 0, of an engine with this bootstrap port; raises as `run_engine` does."""

    async def wait(_: Link, process: Process) -> None:
        await process.wait()

    await _host(evolve(spec, bootstrap_port=port), start_host, runtime, wait)


async def run_encoder(
    spec: SglangSpec,
    start_host: HostStarter,
    registration: Registration[Encoder],
    runtime: HostRuntime,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one encoder; `started()` means that it can be asked. Raises as `run_engine` does."""

    async def offer(link: Link, process: Process) -> str | None:
        with suppress(EngineLost):
            offered = HostedEncoder(link, await engine_info(link))
            with registration.publish(offered):
                task_status.started()
                return await watched(offered, process, runtime.silent_s)
        return None

    await _host(spec, start_host, runtime, offer)


async def run_embedder(
    spec: SglangSpec,
    start_host: HostStarter,
    registration: Registration[Embedder],
    runtime: HostRuntime,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one embedder; `started()` means that it can be asked. Raises as `run_engine` does."""

    async def offer(link: Link, process: Process) -> str | None:
        with suppress(EngineLost):
            offered = SglangEmbedder(link, await engine_info(link))
            with registration.publish(offered):
                task_status.started()
                return await watched(offered, process, runtime.silent_s)
        return None

    await _host(spec, start_host, runtime, offer)


async def run_checker(
    spec: SglangSpec, start_host: HostStarter, registration: Registration[Link], runtime: HostRuntime
) -> None:
    """Run one grammar checker, and publish the link to it; raises as `run_engine` does."""

    async def offer(link: Link, process: Process) -> None:
        with registration.publish(link):
            await process.wait()

    await _host(spec, start_host, runtime, offer)


async def _host(spec: SglangSpec, start_host: HostStarter, runtime: HostRuntime, use: Use) -> None:
    async def start(place: Path, files: Path, descriptors: Descriptors) -> Process:
        if spec.diffusion_settings:
            (place / boot_message.DIFFUSION_FILE).write_text(json.dumps(spec.diffusion_settings))
        return await start_host(boot_message.build(spec, str(place), str(files)), descriptors)

    await run_host(spec.name, start, runtime, use, UNEXPLAINED)
