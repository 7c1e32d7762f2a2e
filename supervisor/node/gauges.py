"""Gauges read from the state of a node at each scrape: of its tasks, its engines, its links, its gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import trio
from attrs import asdict

from actors.engines.encoding.cache import EmbeddingCache
from actors.kit.fair_budget import BudgetStatistics
from actors.media.media import MediaStatistics
from actors.text.prompt_cache import PromptCache, PromptCacheStatistics
from supervisor.cluster.directory import Directory
from supervisor.gateway.gateway import Gateway
from supervisor.links.link import Link
from supervisor.links.traffic import Traffic
from supervisor.media.decoding import DecoderStatistics
from supervisor.node.media_child import MediaChildren
from supervisor.node.pools import PoolView
from supervisor.telemetry.registry import Registry, Samples
from supervisor.tensors.shared_memory import SharedMemory


def add_node_gauges(registry: Registry, directory: Directory) -> None:
    """Define the gauges of a node, and of the engines that run on it."""
    registry.add_value(
        "espalier_node_tasks", "Tasks of the node", lambda: trio.lowlevel.current_statistics().tasks_living
    )
    registry.add_value("espalier_node_draining", "Whether the node drains", lambda: float(directory.draining))
    registry.add_gauge(
        name="espalier_engine_slots",
        about="Requests that the engine computes at once",
        labels="engine",
        read=lambda: [((worker.full_name,), float(worker.idle_offer.slots)) for worker in directory.local.values()],
    )
    registry.add_gauge(
        name="espalier_engine_requests_assigned",
        about="Requests given to the engine, whether or not they have a slot",
        labels="engine",
        read=lambda: [((worker.full_name,), float(worker.in_flight.requests)) for worker in directory.local.values()],
    )
    registry.add_gauge(
        name="espalier_engine_model_mismatch",
        about="Whether the engine is not asked: its model differs, or this node cannot make its hand-off",
        labels="engine",
        read=lambda: _mismatches(directory),
    )


def add_shared_memory_gauges(registry: Registry, shared: SharedMemory) -> None:
    """Define the gauges of the memory that a node shares with the processes of its engines."""
    registry.add_value(
        "espalier_shared_memory_bytes",
        "Tensors in memory that the node shares with its engines, in either direction",
        lambda: float((held := shared.statistics()).region_bytes + held.mapped_bytes),
    )
    registry.add_value(
        "espalier_shared_memory_waiting",
        "Requests whose tensors wait for shared memory",
        lambda: float(shared.statistics().waiting),
    )


def add_encoder_gauges(registry: Registry, node: str, embeddings: Mapping[str, EmbeddingCache]) -> None:
    """Define the metrics of the embeddings that each encoder of a node keeps."""
    registry.add_gauge(
        name="espalier_encoder_cache_bytes",
        about="Embeddings that the encoder keeps",
        labels="engine",
        read=lambda: [((f"{node}/{name}",), float(cache.kept_bytes)) for name, cache in embeddings.items()],
    )
    registry.add_counter(
        name="espalier_encoder_cache_evictions",
        about="Items whose embeddings made room for others",
        labels="engine",
        read=lambda: [((f"{node}/{name}",), float(cache.evictions)) for name, cache in embeddings.items()],
    )


def add_media_gauges(registry: Registry, media: MediaChildren) -> None:
    """Define the gauges of a gateway's media actor; all are 0 where no model takes images or videos."""
    nothing = BudgetStatistics(taken=0, waiting=0)

    def budgets() -> MediaStatistics:
        if media.preparations is None:
            return MediaStatistics(nothing, nothing, nothing, nothing)
        return media.preparations.statistics()

    def failures() -> Samples:
        counts = DecoderStatistics() if media.decoders is None else media.decoders.counts
        return [(("crash",), float(counts.crashes)), (("false_answer",), float(counts.malformed))]

    def taken() -> Samples:
        now = budgets()
        return [
            (("fetched",), float(now.fetched_bytes.taken)),
            (("prepared",), float(now.prepared_bytes.taken)),
            (("embedded",), float(media.embeddings.taken)),
        ]

    def running() -> Samples:
        now = budgets()
        return [(("fetches",), float(now.fetches.taken)), (("decodes",), float(now.decodes.taken))]

    def waiting() -> Samples:
        now = {**asdict(budgets(), recurse=False), "embedded_bytes": media.embeddings.statistics()}
        return [((name,), float(budget.waiting)) for name, budget in now.items()]

    registry.add_gauge("espalier_media_bytes", "Memory of images and videos of requests", "kind", taken)
    registry.add_gauge("espalier_media_running", "Fetches, and processes of decoders", "kind", running)
    registry.add_gauge("espalier_media_waiting", "Images, videos or requests that wait, by what for", "kind", waiting)
    registry.add_counter("espalier_media_decoder_failures", "Decoders that crashed or lied", "kind", failures)


def add_prompt_cache_metrics(registry: Registry, caches: Mapping[str, PromptCache]) -> None:
    """Define the metrics of the token ids that a gateway keeps of conversations, for each model."""

    def tokens() -> Samples:
        for name, cache in caches.items():
            now = cache.statistics()
            yield (name, "reused"), float(now.reused_tokens)
            yield (name, "encoded"), float(now.encoded_tokens)

    def each(field: Callable[[PromptCacheStatistics], int]) -> Callable[[], Samples]:
        return lambda: [((name,), float(field(cache.statistics()))) for name, cache in caches.items()]

    registry.add_counter(
        "espalier_prompt_cache_tokens", "Tokens of conversations, by where their ids come from", "model result", tokens
    )
    registry.add_gauge("espalier_prompt_cache_bytes", "Kept ids and hashes", "model", each(lambda now: now.size_bytes))
    registry.add_gauge("espalier_prompt_cache_segments", "Kept segments", "model", each(lambda now: now.segments))
    registry.add_counter("espalier_prompt_cache_evictions", "Dropped segments", "model", each(lambda now: now.evicted))
    registry.add_counter(
        "espalier_prompt_cache_mismatches",
        "Ids that were not those of the whole text; after the first nothing is kept any more",
        "model",
        each(lambda now: now.mismatches),
    )


def _mismatches(directory: Directory) -> Samples:
    rejections = directory.models.rejections  # a property, computed at each use
    return [((name,), float(name in rejections)) for name in directory.offers_by_name()]


def add_engine_up(registry: Registry, read: Callable[[], Mapping[str, float]]) -> None:
    """Define `espalier_engine_up`, read from this node's engines, or on the gateway's node from all of the cluster."""
    registry.add_gauge(
        name="espalier_engine_up",
        about="Whether the engine accepts requests",
        labels="engine",
        read=lambda: [((name,), value) for name, value in read().items()],
    )


def local_engines_up(directory: Directory) -> dict[str, float]:
    """Return 1 for each engine of this node that accepts requests, 0 for the others."""
    return {worker.full_name: float(worker.offer.up) for worker in directory.local.values()}


def add_gateway_gauges(registry: Registry, gateway: Gateway) -> None:
    """Define the gauges of a gateway."""
    gate = gateway.gate
    registry.add_value("espalier_requests_running", "Generations being answered", lambda: gate.inside)
    registry.add_value("espalier_requests_waiting", "Requests that wait for admission", lambda: gate.waiting)
    registry.add_value("espalier_client_connections", "Connections of clients", lambda: len(gateway.connections))


def add_pool_gauges(registry: Registry, pools: PoolView) -> None:
    """Define the gauges of every pool of a gateway's models."""
    gauges = {
        "workers_up": ("Workers of the pool that can be asked", "up"),
        "busy": ("Requests at workers of the pool, also those that wait there", "busy"),
        "slots": ("Slots of the workers of the pool that can be asked", "slots"),
        "waiting": ("Requests that wait for the pool at this gateway", "waiting"),
    }
    for name, (about, key) in gauges.items():
        registry.add_gauge(
            name=f"espalier_pool_{name}", about=about, labels="pool", read=partial(_pool_samples, pools, key)
        )


def _pool_samples(pools: PoolView, key: str) -> Samples:
    return [((state.name,), float(getattr(state, key))) for state in pools.states()]


def add_link_metrics(registry: Registry, directory: Directory, traffic: Mapping[str, Traffic]) -> None:
    """Define the metrics of links to other nodes; the counts of a lost link continue with the next link to its node."""

    def links() -> list[tuple[str, Link]]:
        return [(name, node.link) for name, node in directory.nodes.items() if node.link is not None]

    def wanted() -> Samples:
        return [
            ((name,), float(node.link is not None))
            for name, node in directory.nodes.items()
            if node.link is not None or directory.should_link(name)
        ]

    registry.add_gauge("espalier_link_up", "Whether there is a link to the node", "peer", wanted)
    registry.add_gauge(
        name="espalier_link_silence_seconds",
        about="Time since the last message of the node, heartbeats included",
        labels="peer",
        read=lambda: [((node,), link.silent_s) for node, link in links()],
    )
    registry.add_gauge(
        name="espalier_link_streams",
        about="Open streams: asked from here, or served here",
        labels="peer side",
        read=lambda: [
            ((node, side), float(len(streams)))
            for node, link in links()
            for side, streams in (("asked", link.peer.asked), ("served", link.peer.served))
        ],
    )
    registry.add_gauge(
        name="espalier_link_queued_bytes",
        about="Bytes that wait to be sent",
        labels="peer",
        read=lambda: [((node,), float(link.peer.queued_bytes)) for node, link in links()],
    )
    registry.add_gauge(
        name="espalier_link_attached_bytes",
        about="Tensors that are on their way, not whole yet",
        labels="peer direction",
        read=lambda: [
            ((node, direction), float(size))
            for node, held in ((node, link.peer.statistics()) for node, link in links())
            for direction, size in (("sent", held.sending_bytes), ("received", held.receiving_bytes))
        ],
    )
    _add_traffic_counters(registry, traffic)


def _add_traffic_counters(registry: Registry, traffic: Mapping[str, Traffic]) -> None:
    registry.add_counter(
        name="espalier_link_messages",
        about="Messages",
        labels="peer direction",
        read=lambda: [
            ((node, direction), count)
            for node, totals in traffic.items()
            for direction, count in (("sent", totals.messages_sent), ("received", totals.messages_received))
        ],
    )
    registry.add_counter(
        name="espalier_link_bytes",
        about="Bytes of messages",
        labels="peer direction",
        read=lambda: [
            ((node, direction), count)
            for node, totals in traffic.items()
            for direction, count in (("sent", totals.bytes_sent), ("received", totals.bytes_received))
        ],
    )
    registry.add_counter(
        name="espalier_link_stream_waits",
        about="Waits for a free stream",
        labels="peer",
        read=lambda: [((node,), totals.waits) for node, totals in traffic.items()],
    )
