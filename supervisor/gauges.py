"""What every node tells of itself at a scrape, beside what it has counted: its engines, its tasks, its links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from supervisor.directory import Directory
from supervisor.metrics import Metrics
from supervisor.traffic import Traffic


def of_node(metrics: Metrics, directory: Directory) -> None:
    """Let `metrics` tell how a node and the engines that run on it are."""
    metrics.gauges |= {
        "espalier_tasks": (
            "Tasks that live in the node",
            lambda: {"node": trio.lowlevel.current_statistics().tasks_living},
        ),
        "espalier_draining": ("Whether the node drains", lambda: {"node": float(directory.draining)}),
        "espalier_engine_up": (
            "Whether the engine can be asked",
            lambda: {each.load.name: float(each.offer.up) for each in directory.here.values()},
        ),
        "espalier_engine_slots": (
            "Requests that the engine computes at once",
            lambda: {each.load.name: float(each.offered.slots) for each in directory.here.values()},
        ),
        "espalier_engine_asked": (
            "Requests that the engine was given, those that wait for a slot included",
            lambda: {each.load.name: float(each.busy) for each in directory.here.values()},
        ),
        "espalier_engine_refused": (
            "Whether the engine is never asked, since its model is another one",
            lambda: {name: float(name in directory.models.whys) for name in directory.named()},
        ),
    }


def of_links(directory: Directory, traffic: Mapping[str, Traffic]) -> Iterator[Metric]:
    """Yield what is known of the links to each other node; a lost link's counts go on with the next one's."""
    up = GaugeMetricFamily("espalier_link_up", "Whether there is a link to the node", labels=("node",))
    silence = GaugeMetricFamily(
        "espalier_link_silence_seconds", "Time since the node was last heard, heartbeats included", labels=("node",)
    )
    streams = GaugeMetricFamily(
        "espalier_link_streams", "Streams that are open: asked from here, or served here", labels=("node", "side")
    )
    queued = GaugeMetricFamily("espalier_link_queued_bytes", "Bytes that wait to leave", labels=("node",))
    for node, (_, link, _) in directory.nodes.items():
        if link is None and not directory.meets(node):
            continue
        up.add_metric((node,), float(link is not None))
        if link is not None:
            silence.add_metric((node,), link.silent_s)
            streams.add_metric((node, "asked"), float(len(link.peer.asked)))
            streams.add_metric((node, "served"), float(len(link.peer.served)))
            queued.add_metric((node,), float(link.peer.queued_bytes))
    yield from (up, silence, streams, queued)
    messages = CounterMetricFamily("espalier_link_messages", "Messages", labels=("node", "direction"))
    sizes = CounterMetricFamily("espalier_link_bytes", "Bytes of messages", labels=("node", "direction"))
    waits = CounterMetricFamily("espalier_link_waits", "Waits of askers for a free stream", labels=("node",))
    for node, crossed in traffic.items():
        messages.add_metric((node, "sent"), crossed.messages_sent)
        messages.add_metric((node, "received"), crossed.messages_received)
        sizes.add_metric((node, "sent"), crossed.bytes_sent)
        sizes.add_metric((node, "received"), crossed.bytes_received)
        waits.add_metric((node,), crossed.waits)
    yield from (messages, sizes, waits)
