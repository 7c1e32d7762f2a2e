"""The ports by which the processor of a model has images and videos prepared and encoded."""

from __future__ import annotations

from functools import partial

from actors.media.preparation import Vision
from actors.routing.encoding import EncodeWork, Encoding
from actors.text.model import TextModel
from protocol.messages.media import MediaItem
from protocol.messages.text import Respond
from supervisor.cluster.directory import Directory
from supervisor.cluster.model_pool import ModelPool
from supervisor.config.schema import Cluster
from supervisor.node import router_child
from supervisor.node.media_child import MediaChildren
from supervisor.observers import RoutingMetrics
from supervisor.runtime import Runtime


def processor_vision(
    cluster: Cluster, name: str, text: TextModel, directory: Directory, runtime: Runtime, media: MediaChildren
) -> Vision | None:
    """Return the ports of a model's processor, None for a model that takes text alone."""
    if text.vision is None or media.address is None:
        return None
    encoding = Encoding(
        pool=ModelPool(directory, name),
        limits=router_child.limits(cluster.model[name]),
        new_id=runtime.new_id,
        observer=RoutingMetrics(runtime.metrics, name),
        spans=runtime.spans,
    )
    return Vision(name, media.address, partial(encode_items, encoding), media.embeddings)


async def encode_items(encoding: Encoding, request: Respond, items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """Return the items of a client's request with embeddings, by encoders of the cluster; raises `RequestError`."""
    work = EncodeWork(request.id, items, request.priority or 0, request.owner, request.trace)
    return await encoding.embeddings(work)
