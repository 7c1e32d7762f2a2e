"""The media actor of a gateway's node, with its decoders: one for all of its models that take images or videos."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import field, frozen

from actors.kit.calls import Address, Call, mailbox
from actors.kit.fair_budget import FairBudget
from actors.media.jobs import Bounds
from actors.media.media import WAITING_MAX, MediaPorts, PreparationLimits, Preparations, decoder_limits, media
from actors.media.preparation import embeddings_budget
from actors.text.model import TextModel
from protocol.errors import StartFailed
from protocol.messages.media import MediaPrepared, PrepareMedia
from supervisor.config.media import MediaSection, parse_host, parse_network
from supervisor.config.schema import Cluster
from supervisor.engines.kind import NodeContext, RetriedChild
from supervisor.links.tls import default_context
from supervisor.media.contents import StoredContent
from supervisor.media.decoding import DecodeLimits, Decoders
from supervisor.media.fetching import Fetcher, FetchRules
from supervisor.media.files import MediaFiles
from supervisor.media.memory import MediaMemory
from supervisor.media.network import SystemNetwork
from supervisor.media.template import LADDER, DecoderTemplate, decoder_template
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Tree
from supervisor.version import version

log = logging.getLogger(__name__)

NAME = "media"
MediaAddress: TypeAlias = Address[PrepareMedia, MediaPrepared, None]
MediaCalls: TypeAlias = trio.MemoryReceiveChannel[Call[PrepareMedia, MediaPrepared, None]]


@frozen
class MediaChildren:
    """The media actor of a node: its address, None if no model needs one, and its children."""

    address: MediaAddress | None = None
    children: tuple[Tree, ...] = ()
    published: Mapping[str, RetriedChild] = {}
    preparations: Preparations[StoredContent] | None = None
    decoders: Decoders | None = None
    embeddings: FairBudget = field(factory=embeddings_budget)  # bytes, of all models together


def media_children(context: NodeContext, texts: Mapping[str, TextModel]) -> MediaChildren:
    """Return the media actor of a gateway's node; raises `StartFailed` if a file that it needs cannot be used."""
    layouts = {name: text.vision for name, text in texts.items() if text.vision is not None}
    if not layouts:
        return MediaChildren()
    cluster, runtime, section = context.cluster, context.runtime, context.cluster.gateway.media
    address: MediaAddress
    address, inbox = mailbox(WAITING_MAX)
    registration: Registration[DecoderTemplate] = Registration()
    memory = MediaMemory()
    fetcher = _fetcher(cluster, memory)
    decoders = Decoders(registration, memory, _decode_limits(section))
    ports = MediaPorts(fetcher.source, fetcher.fetch, decoders.inspect, decoders.decode, memory.release)
    preparations = Preparations(layouts, ports, _limits(section), runtime.metrics.media_prepared)
    template = Child(
        name="decoders",
        run=partial(decoder_template, filter_required=section.sandbox == "required"),
        args=(registration, context.output_log("media-decoders"), runtime.grace, runtime.environment),
        stop_within_s=LADDER.total_s + 1.0,
        about="forks a process without files and network for each image or video that is decoded; its filter of system"
        f" calls is {section.sandbox}",
        limits=(("processes", decoder_limits(section.decoders).total),),
    )
    actor = Child(
        name="preparation",
        run=_prepare,
        args=(inbox, preparations, memory),
        about=f"fetches from {', '.join(section.allowed_hosts) or 'nowhere'}; files: {section.file_root or 'none'}",
        limits=(
            *(("items", section.items_max), ("tokens", section.tokens_max), ("bytes", section.bytes_max)),
            *(("pixels", section.pixels_max), ("seconds", section.seconds_max)),
            *(("fetch s", section.fetch_s), ("prepare s", section.prepare_s)),
            ("fetched bytes", section.fetched_bytes_max),
            *(("prepared bytes", section.prepared_bytes_max), ("embedded bytes", section.embedded_bytes_max)),
        ),
    )
    # A tree of its own that never gives up: what hostile media do to decoders counts against no other child.
    tree = Tree(
        name=NAME,
        children=(template, actor),
        restarts_max=None,
        backoff=Backoff(min_s=0.5, crashes=True),
        needs=(),
        about=f"images and videos for {', '.join(layouts)}",
    )
    embeddings = embeddings_budget(section.embedded_bytes_max)
    return MediaChildren(address, (tree,), {NAME: registration}, preparations, decoders, embeddings)


async def _prepare(  # noqa: ASYNC128  # media calls started()
    inbox: MediaCalls,
    preparations: Preparations[StoredContent],
    memory: MediaMemory,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        await media(inbox, preparations, task_status=task_status)


def _fetcher(cluster: Cluster, memory: MediaMemory) -> Fetcher:
    section = cluster.gateway.media
    root = None if section.file_root is None else (cluster.folder / section.file_root).absolute()
    hosts = [pattern for text in section.allowed_hosts if (pattern := parse_host(text)) is not None]
    networks = [network for text in section.allowed_networks if (network := parse_network(text)) is not None]
    rules = FetchRules(
        hosts=hosts,
        networks=networks,
        bytes_max=section.bytes_max,
        fetch_s=section.fetch_s,
        agent=f"espalier/{version()}",
    )
    files = MediaFiles(root, section.fetch_s)
    authority = None if section.tls_authority is None else cluster.folder / section.tls_authority
    return Fetcher(rules, SystemNetwork(), files, tls_context(authority), memory.close_later)


def tls_context(authority: Path | None) -> ssl.SSLContext:
    """Return a context with the system's authorities, and a file's; raises `StartFailed`."""
    context = default_context()
    try:
        if authority is not None:
            context.load_verify_locations(authority)
    except OSError as error:  # an `SSLError` is one
        raise StartFailed(f"gateway.media.tls_authority: {authority} cannot be used: {error}") from error
    return context


def _decode_limits(section: MediaSection) -> DecodeLimits:
    bounds = Bounds(pixels_max=section.pixels_max, seconds_max=section.seconds_max)
    return DecodeLimits(section.bytes_max, bounds)


def _limits(section: MediaSection) -> PreparationLimits:
    return PreparationLimits(
        items_max=section.items_max,
        tokens_max=section.tokens_max,
        prepare_s=section.prepare_s,
        fetched_bytes_max=section.fetched_bytes_max,
        prepared_bytes_max=section.prepared_bytes_max,
        decodes_max=section.decoders,
    )
