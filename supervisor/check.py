"""What can be known before anything starts: the tree, every limit, and what stands in the way."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

import trio

from protocol.errors import StartFailed
from supervisor.config import LOOPBACK, Cluster
from supervisor.doors.door import ANY
from supervisor.doors.keys import ADMIN, KEYS, Keys, Sources
from supervisor.folders import Folder
from supervisor.house import build
from supervisor.metrics import Metrics
from supervisor.process import Hurry
from supervisor.tree import render
from supervisor.world import World

T = TypeVar("T")

ENGINE_BYTES = 700 * 1024 * 1024  # of an engine's processes beside its weights; what a zygote shares is counted once


def pick(cluster: Cluster, name: str | None) -> str:
    """Return the node to run; raises `StartFailed` if the file has several and none was named."""
    if name is None:
        if len(cluster.node) > 1:
            raise StartFailed(f"the file has several nodes; name one with --node: {', '.join(cluster.node)}")
        return next(iter(cluster.node))
    if name not in cluster.node:
        raise StartFailed(f"there is no node {name}; there is {', '.join(cluster.node)}")
    return name


def text(cluster: Cluster, name: str, environment: Mapping[str, str]) -> str:
    """Return one node's tree with every limit, and who may come in; opens nothing but files."""

    def no_chance(_: int) -> NoReturn:
        raise AssertionError("nothing runs")

    async def aside(function: Callable[[], T], /) -> T:
        await trio.lowlevel.checkpoint()
        return function()

    nowhere = Path(tempfile.gettempdir())
    world = World(Folder(nowhere, -1), nowhere, environment, str, float, str, aside, Hurry(), Metrics(), no_chance)
    return f"{render(build(cluster, name, world).tree)}\n{_admission(cluster, keys(cluster, environment))}"


def keys(cluster: Cluster, environment: Mapping[str, str]) -> Keys:
    """Return the keys of clients; raises `StartFailed` if they cannot be read, or if there must be some and are not."""
    section = cluster.gateway
    known = Keys(Sources(cluster.keys, {name: environment[name] for name in (KEYS, ADMIN) if name in environment}))
    known.load()
    where = f"name a file of them as gateway.keys, or set {KEYS}"
    if not known.wanted:
        if section.host not in LOOPBACK:
            raise StartFailed(f"gateway.host {section.host} is not loopback, so clients need keys: {where}")
        for key in ("names", "origins"):
            if ANY in getattr(section, key):
                raise StartFailed(
                    f'gateway.{key} = ["{ANY}"] opens this server to every web page without keys: {where}'
                )
    elif not known.names(admin=False) and not known.names(admin=True):
        raise StartFailed(f"there is no key, so nobody could come in: {where}")
    return known


def _admission(cluster: Cluster, known: Keys) -> str:
    """Return in a few lines who may come in; names, never secrets."""
    section = cluster.gateway
    tls = "plain" if section.tls_certificate is None else f"TLS with {section.tls_certificate}"
    admins = ", ".join(known.names(admin=True)) or ("nobody" if known.wanted else "everybody")
    lines = [
        f"clients: {', '.join(known.names(admin=False)) or 'nobody'}"
        if known.wanted
        else "clients: everybody, no keys",
        f"admin: {admins}",
        f"names: {', '.join(section.names)}; web pages of: {', '.join(section.origins) or 'the same names'}; {tls}",
    ]
    if cluster.certificate is not None:
        cluster.certificate.context()
    return "\n".join(lines)


def ahead(cluster: Cluster, name: str) -> None:
    """Raise `StartFailed`, in one sentence, for what would only fail after seconds of starting."""
    _port_is_free(cluster)
    _memory_is_there(cluster, name)


def _port_is_free(cluster: Cluster) -> None:
    section = cluster.gateway
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((section.host, section.port))
        except OSError as error:
            raise StartFailed(
                f"port {section.port} of {section.host} cannot be had: {error.strerror}; name another as gateway.port"
            ) from error


def _memory_is_there(cluster: Cluster, name: str) -> None:
    """Compare what the engines on the CPU will need with what the machine has left."""
    on_cpu = [engine for engine in cluster.engines_on(name).values() if engine.device == "cpu"]
    needed = sum(ENGINE_BYTES + _weights(cluster.model_path(engine.model)) for engine in on_cpu)
    available = _available()
    if available is not None and needed > available:
        raise StartFailed(
            f"too little memory: {len(on_cpu)} engines on the CPU need about {needed / 2**30:.1f} GiB,"
            f" and {available / 2**30:.1f} GiB are available"
        )


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _available() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
