"""One TensorRT-LLM engine or encoder as a child of the tree: the life of its host, and the port that it publishes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import trio
from attrs import evolve

from actors.engines.encoding.port import Encoder
from actors.engines.hosted_encoder import HostedEncoder
from actors.engines.port import Engine
from actors.engines.trtllm import boot_message
from actors.engines.trtllm.engine import TrtllmEngine
from actors.engines.trtllm.spec import TrtllmSpec
from protocol.errors import EngineLost
from supervisor.engines.file_adapters import with_loaded
from supervisor.engines.host.life import HostRuntime, StartHost, engine_info, run_host, watched
from supervisor.engines.host.spawn import ROOT, Descriptors, spawn_host
from supervisor.links.link import Link
from supervisor.processes.process import Process
from supervisor.supervision.registration import Registration

HOST_MODULE = "actors.engines.trtllm.host"


async def run_engine(
    spec: TrtllmSpec,
    python: str | None,
    environment: Mapping[str, str],
    registration: Registration[Engine],
    runtime: HostRuntime,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one engine by the interpreter `python`; `started()` means that it can be asked.

    Raises `StartFailed` if it cannot become ready, `EngineDied` when its process or its link ends later.
    """
    own = evolve(spec, adapters=with_loaded(spec.adapters, registration.last))

    async def offer(link: Link, process: Process) -> str | None:
        with suppress(EngineLost):
            offered = TrtllmEngine(link, await engine_info(link))
            with registration.publish(offered):
                task_status.started()
                return await watched(offered, process, runtime.silent_s)
        return None

    await run_host(spec.name, _starter(own, python, environment), runtime, offer)


async def run_encoder(
    spec: TrtllmSpec,
    python: str | None,
    environment: Mapping[str, str],
    registration: Registration[Encoder],
    runtime: HostRuntime,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one encoder by the interpreter `python`; `started()` means that it can be asked. Raises as `run_engine`."""

    async def offer(link: Link, process: Process) -> str | None:
        with suppress(EngineLost):
            offered = HostedEncoder(link, await engine_info(link))
            with registration.publish(offered):
                task_status.started()
                return await watched(offered, process, runtime.silent_s)
        return None

    await run_host(spec.name, _starter(spec, python, environment), runtime, offer)


def _starter(spec: TrtllmSpec, python: str | None, environment: Mapping[str, str]) -> StartHost:
    """Return the function that starts a host of this description."""

    async def start(place: Path, _files: Path, descriptors: Descriptors) -> Process:
        boot = boot_message.build(spec, str(place))
        text = boot_message.encode(evolve(boot, environment={})).decode()
        own = host_environment(environment, boot.environment, place)
        return await spawn_host(spec.name, (python or sys.executable, "-m", HOST_MODULE), text, own, descriptors)

    return start


def host_environment(environment: Mapping[str, str], own: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of a host: the node's, the path of these modules, and the engine's own variables."""
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))
    return {**environment, "PYTHONPATH": path, "TMPDIR": str(folder), **own}
