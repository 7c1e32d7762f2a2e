"""File descriptors: as many as the process may have, and enough of them for all that the file of a cluster allows."""

from __future__ import annotations

import resource
from contextlib import suppress

from protocol.errors import StartFailed
from supervisor.config.schema import Cluster
from supervisor.sockets.descriptor_reserve import RESERVE

RAISED_MAX = 1_048_576  # some programs walk through all that they could have
OF_PROCESS = 64  # of the interpreter, the event loop, logs, threads, files that are read now and then
OF_ENGINE = 8  # its link, its output, its pidfd, its log, and what its start takes for a moment
OF_LISTENERS = 128  # connections that are refused, operators at the node's own port, and the listeners
OF_METRICS = 128


def raise_limit() -> None:
    """Let this process, and what it starts, have as many descriptors as the system permits it to ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = RAISED_MAX if hard == resource.RLIM_INFINITY else min(hard, RAISED_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # then it stays as it is, and is compared with what is needed
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def needed(cluster: Cluster, name: str) -> dict[str, int]:
    """Return how many descriptors a node may come to need, by what for."""
    section = cluster.node[name]
    engines = sum(1 for each in cluster.engine.values() if name in each.nodes)
    counts = {
        "connections": cluster.gateway.limits.connections_max if cluster.gateway.node == name else 0,
        "links": len(cluster.node) - 1 + len(cluster.cluster.join),
        "engines": OF_ENGINE * (engines + 1) if engines else 0,  # and what they are forked from
        "listeners": OF_LISTENERS
        + cluster.cluster.handshakes_max * (section.listen is not None)
        + OF_METRICS * (section.metrics is not None),
        "the process": OF_PROCESS,
        "the reserve": RESERVE,
    }
    return {what: count for what, count in counts.items() if count}


def check_limit(cluster: Cluster, name: str) -> str:
    """Return a line about the descriptors of a node; raises `StartFailed` if it may not have as many as it may need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    counts = needed(cluster, name)
    total = sum(counts.values())
    parts = " + ".join(f"{count:,} for {what}" for what, count in counts.items())
    if limit != resource.RLIM_INFINITY and total > limit:
        raise StartFailed(
            f"node {name} may need {total:,} file descriptors, and its process may have {limit:,}: {parts};"
            " raise the limit (ulimit -n), or lower gateway.limits.connections_max"
        )
    return f"file descriptors: {total:,} at most: {parts}"
