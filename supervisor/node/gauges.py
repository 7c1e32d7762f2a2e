"""What every node tells of itself at a scrape, beside what it has counted: its engines, its tasks, its links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from supervisor.cluster.directory import Directory
from supervisor.links.traffic import Traffic
from supervisor.telemetry.metrics import Metrics, pieces


def add_node_gauges(metrics: Metrics, directory: Directory) -> None:
    """Let `metrics` tell how a node and the engines that run on it are."""
    metrics.gauges |= {
        "espalier_node_tasks": (
            "Tasks that live in the node",
            lambda: {"node": trio.lowlevel.current_statistics().tasks_living},
        ),
        "espalier_node_draining": ("Whether the node drains", lambda: {"node": float(directory.draining)}),
        "espalier_engine_up": (
            "Whether the engine can be asked",
            lambda: {each.load.name: float(each.offer.up) for each in directory.here.values()},
        ),
        "espalier_engine_slots": (
            "Requests that the engine computes at once",
            lambda: {each.load.name: float(each.offered.slots) for each in directory.here.values()},
        ),
        "espalier_engine_requests_assigned": (
            "Requests that the engine was given, those that wait for a slot included",
            lambda: {each.load.name: float(each.busy) for each in directory.here.values()},
        ),
        "espalier_engine_model_mismatch": (
            "Whether the engine is never asked, since its model is another one",
            partial(_refused, directory),
        ),
    }


def _refused(directory: Directory) -> dict[str, float]:
    whys = directory.models.rejections  # made anew each time
    return {name: float(name in whys) for name in directory.named()}


def link_families(directory: Directory, traffic: Mapping[str, Traffic]) -> Iterator[Metric]:
    """Yield what is known of the links to each other node; a lost link's counts go on with the next one's."""
    known = {node: link for node, (_, link, _) in directory.nodes.items()}
    all_links = {node: link for node, link in known.items() if link is not None or directory.meets(node)}
    links = [(node, link) for node, link in all_links.items() if link is not None]
    crossed = list(traffic.items())
    gauge, counter = partial(pieces, GaugeMetricFamily), partial(pieces, CounterMetricFamily)
    yield from gauge(
        *("espalier_link_up", "Whether there is a link to the node", "node"),
        (((node,), float(link is not None)) for node, link in all_links.items()),
    )
    yield from gauge(
        *("espalier_link_silence_seconds", "Time since the node was last heard, heartbeats included", "node"),
        (((node,), link.silent_s) for node, link in links),
    )
    yield from gauge(
        *("espalier_link_streams", "Streams that are open: asked from here, or served here", "node side"),
        (
            ((node, side), float(len(streams)))
            for node, link in links
            for side, streams in (("asked", link.peer.asked), ("served", link.peer.served))
        ),
    )
    yield from gauge(
        *("espalier_link_queued_bytes", "Bytes that wait to leave", "node"),
        (((node,), float(link.peer.queued_bytes)) for node, link in links),
    )
    yield from counter(
        *("espalier_link_messages", "Messages", "node direction"),
        (
            ((node, direction), count)
            for node, each in crossed
            for direction, count in (("sent", each.messages_sent), ("received", each.messages_received))
        ),
    )
    yield from counter(
        *("espalier_link_bytes", "Bytes of messages", "node direction"),
        (
            ((node, direction), count)
            for node, each in crossed
            for direction, count in (("sent", each.bytes_sent), ("received", each.bytes_received))
        ),
    )
    yield from counter(
        *("espalier_link_stream_waits", "Waits of askers for a free stream", "node"),
        (((node,), each.waits) for node, each in crossed),
    )
