"""The file descriptors of a node: how many it may need, compared with the limit of its process before it starts.

A node that runs out of descriptors can accept no connection, read no file and start no engine, and finds out under its
highest load. So the most that its configuration allows is computed and compared at the start. The counts below are
generous constants, not measurements.
"""

from __future__ import annotations

import resource
from contextlib import suppress

from actors.media.content_memory import CONTENT_BYTES_MIN
from actors.media.media import FETCHES_MAX, decoder_limits
from actors.media.model_files import IMAGE_PROCESSOR, PROCESSOR
from protocol.errors import StartFailed
from supervisor.cluster.link_settings import HANDSHAKES_MAX
from supervisor.config.schema import Cluster
from supervisor.media.memory import COPIED_BYTES_MAX
from supervisor.sockets.descriptor_reserve import RESERVE
from supervisor.tensors.shared_memory import DESCRIPTOR_BYTES

RAISED_MAX = 1_048_576  # some programs walk through all descriptors up to the limit
PROCESS_NEEDS = 64  # the interpreter, the event loop, logs, threads, files that are read now and then
ENGINE_NEEDS = 8  # its link, its output, its pidfd, its log, and more while it starts
LISTENER_NEEDS = 128  # the listeners, operators at the control socket, connections that are being refused
MONITORING_NEEDS = 128
DECODER_NEEDS = 4  # the socket of its answers, and a result on its way


def raise_limit() -> None:
    """Raise the limit of this process and its children, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = RAISED_MAX if hard == resource.RLIM_INFINITY else min(hard, RAISED_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the limit stays as it is, and `check_limit` judges it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def needed(cluster: Cluster, name: str) -> dict[str, int]:
    """Return how many descriptors a node may need at most, by purpose."""
    section = cluster.node[name]
    engines = sum(name in engine.nodes for engine in cluster.engine.values())
    counts = {
        "connections": cluster.gateway.limits.connections_max if name in cluster.gateway_nodes else 0,
        "links": len(cluster.node) - 1 + len(cluster.cluster.join),
        "engines": ENGINE_NEEDS * (engines + 1) if engines else 0,  # one more for the process that forks them
        "listeners": LISTENER_NEEDS
        + HANDSHAKES_MAX * (section.listen is not None)
        + MONITORING_NEEDS * (section.metrics is not None),
        "media": _media(cluster) if name in cluster.gateway_nodes else 0,
        # What it shares with its engines, and what they share with it.
        "shared memory": 2 * section.shared_bytes_max // DESCRIPTOR_BYTES if engines and _sees(cluster) else 0,
        "the process": PROCESS_NEEDS,
        "the reserve": RESERVE,
    }
    return {purpose: count for purpose, count in counts.items() if count}


def _sees(cluster: Cluster) -> bool:
    """Whether a model of the cluster may take images or videos, whose tensors take descriptors."""
    folders = [cluster.model_path(name) for name in cluster.model]
    return any((folder / file).exists() for folder in folders for file in (PROCESSOR, IMAGE_PROCESSOR))


def _media(cluster: Cluster) -> int:
    """Return how many a media actor may need: for contents, fetches, decoders, and what they have decoded."""
    if not _sees(cluster):
        return 0
    section = cluster.gateway.media
    contents = section.fetched_bytes_max // CONTENT_BYTES_MIN
    prepared = 2 * section.prepared_bytes_max // COPIED_BYTES_MAX  # a mapping has one, and engines open another
    return contents + prepared + FETCHES_MAX + DECODER_NEEDS * decoder_limits(section.decoders).total + PROCESS_NEEDS


def check_limit(cluster: Cluster, name: str) -> str:
    """Return a line about the descriptors of a node; raises `StartFailed` if it may need more than it may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    counts = needed(cluster, name)
    total = sum(counts.values())
    parts = " + ".join(f"{count:,} for {purpose}" for purpose, count in counts.items())
    if limit != resource.RLIM_INFINITY and total > limit:
        raise StartFailed(
            f"node {name} may need {total:,} file descriptors, and its process may have {limit:,}: {parts};"
            " raise the limit (ulimit -n), or lower gateway.limits.connections_max"
        )
    return f"file descriptors: {total:,} at most: {parts}"
