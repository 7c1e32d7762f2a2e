"""Scenes in which one process of a node dies and the node continues."""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.endings.streams import Times, check, end_complete, end_in_retryable_error, served, streams
from bench.rig.node import Node, wait_until


def engine_killed(role: str, target: Node, texts: dict[str, str]) -> Times:
    """Kill the scheduler or the host under running streams."""
    with streams(target) as (readers, _):
        pid = target.observe()[role].pid
        since = time.perf_counter()
        target.kill(role)
        error_s = end_in_retryable_error(readers, since)
    served_s = served(target, since, texts)
    check(target.observe()[role].pid != pid, "it is the old process")
    return {"error": error_s, "served": served_s}


def zygote_killed(target: Node, texts: dict[str, str]) -> Times:
    """Kill the zygote under running streams, which must not notice; then the host, whose restart must wait."""
    old = target.observe()["zygote"].pid
    with streams(target) as (readers, _):
        since = time.perf_counter()
        target.kill("zygote")
        end_complete(readers, texts)
    target.kill("host")
    killed_at = time.perf_counter()
    served_s = served(target, killed_at, texts)
    check(target.observe()["zygote"].pid != old, "the zygote was not replaced")
    return {"served, since the zygote": served_s + killed_at - since, "since the host": served_s}


def host_killed_again(target: Node, texts: dict[str, str]) -> Times:
    """Kill the host, and its successor while that is still loading."""
    old = target.observe()["host"].pid

    def has_new_host() -> bool:
        host = target.observe().get("host")
        return host is not None and host.pid != old

    target.kill("host")
    check(wait_until(has_new_host, 120.0) is not None, "no new host")
    since = time.perf_counter()
    target.kill("host")
    served_s = served(target, since, texts)
    return {"served by the successor": served_s}


SCENES: dict[str, Callable[[Node, dict[str, str]], Times]] = {
    "scheduler kill -9": lambda target, texts: engine_killed("scheduler", target, texts),
    "host kill -9": lambda target, texts: engine_killed("host", target, texts),
    "host kill -9, and its successor while it loads": host_killed_again,
    "zygote kill -9, then host": zygote_killed,
}
