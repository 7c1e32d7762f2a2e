"""From a cluster's description to one node's tree: which children there are, and what is plugged into what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import trio
from attrs import asdict, define

from actors._kit import Address, Call, mailbox
from actors._queue import queue
from actors._text.model import FILES, TextModel, load
from actors.engines.port import Engine
from actors.processor import TextReply, TextRequest, TextResult, processor
from protocol.errors import StartFailed
from protocol.messages import Finished, Generate, Started, Tokens
from supervisor import known
from supervisor.config import Cluster
from supervisor.doors.asking import Asking, Served
from supervisor.doors.door import Door
from supervisor.doors.gate import Gate
from supervisor.gateway import gateway
from supervisor.plug import Plug
from supervisor.tree import Child, Tree
from supervisor.version import version
from supervisor.workers import Work, Worker, starts, worker
from supervisor.world import World

AskedInbox: TypeAlias = trio.MemoryReceiveChannel[Call[TextRequest, TextReply, TextResult]]


@define(eq=False)
class House:
    """One node's tree, and the handles that the node's own tasks need."""

    tree: Tree
    door: Door


def build(cluster: Cluster, node: str, world: World) -> House:
    """Return the house of one node; raises `StartFailed` if a model's files cannot be used."""
    engines: dict[str, Plug[Engine]] = {name: Plug() for name in cluster.engines_on(node)}
    children: list[Child | Tree] = []
    hosts_of = starts(cluster, node, world, children)
    served: dict[str, Served] = {}
    processors = []
    for name, section in cluster.model.items():
        of_model = {key: each for key, each in cluster.engines_on(node).items() if each.model == name}
        work, work_inbox = _work(section.queue_max)
        text = _text(cluster, name, world.strftime)
        for key, each in of_model.items():
            one = Worker(key, each, text, engines[key], work_inbox)
            children.append(worker(cluster, one, hosts_of, world))
        asked, asked_inbox = _asked(cluster.gateway.requests_max)
        plugs = [engines[key] for key in of_model]
        processors.append(
            Child(
                name=f"processor-{name.replace('/', ':')}",
                run=processor,
                args=(
                    asked_inbox,
                    text,
                    work,
                    partial(known.limits, plugs, cluster.gateway.prompt_tokens_max),
                    world.aside,
                    cluster.gateway.requests_max,
                ),
                about=f"conversations to tokens and back, for {name}",
                limits=(("requests", cluster.gateway.requests_max), ("queue", section.queue_max)),
            )
        )
        served[name] = Served(partial(known.model, name, plugs, int(world.now())), asked, partial(known.longest, plugs))
    door = _door(cluster, served, engines, world)
    # The gateway comes first and goes last: it says why nobody is served yet, and how the last ones ended.
    children = [_gateway(cluster, door), *children, *processors]
    about = f"node on {cluster.node[node].host}, drains for {cluster.node[node].drain_s:g} s"
    return House(Tree(name=node, children=tuple(children), restarts_max=5, restarts_window_s=300.0, about=about), door)


def _work(size: int) -> tuple[Address[Generate, Started | Tokens, Finished], Work]:
    return queue(size, lambda request: request.priority)


def _asked(size: int) -> tuple[Address[TextRequest, TextReply, TextResult], AskedInbox]:
    return mailbox(size)


# Children ------------------------------------------------------------------------------


def _gateway(cluster: Cluster, door: Door) -> Child:
    section = cluster.gateway
    return Child(
        name="gateway",
        run=gateway,
        args=(door, section.host, section.port),
        stop_within_s=section.limits.close_s + 1.0,
        about=f"clients at http{'s' * bool(section.tls_certificate)}://{section.host}:{section.port}",
        limits=(
            ("requests", section.requests_max),
            ("prompt tokens", section.prompt_tokens_max),
            ("waiting", section.waiting_max),
            ("admit s", section.admit_s),
            ("first token s", section.first_token_s),
            ("total s", section.total_s),
            *((key.replace("_", " "), value) for key, value in asdict(section.limits).items()),
        ),
    )


def _door(cluster: Cluster, served: Mapping[str, Served], engines: Mapping[str, Plug[Engine]], world: World) -> Door:
    section = cluster.gateway
    gate = Gate(section.requests_max, section.admit_s, section.waiting_max, partial(known.never_ready, engines))
    asking = Asking(served, world.metrics, section.first_token_s, section.total_s)
    world.metrics.gauges |= {
        "espalier_requests_running": ("Requests being answered", lambda: {"gateway": gate.inside}),
        "espalier_requests_waiting": ("Requests that wait at the gate", lambda: {"gateway": gate.waiting}),
        "espalier_tasks": (
            "Tasks that live in the node",
            lambda: {"node": trio.lowlevel.current_statistics().tasks_living},
        ),
        "espalier_engine_up": ("Whether the engine can be asked", lambda: known.up(engines)),
    }
    return Door(
        asking=asking,
        gate=gate,
        limits=section.limits,
        names=frozenset(section.names),
        origins=frozenset(section.origins),
        unready=partial(known.unready, engines),
        metrics_text=partial(known.metrics_text, engines, world.metrics),
        new_id=world.new_id,
        now=world.now,
        server_info=partial(known.server_info, cluster, engines, version()),
        flush_cache=partial(known.flush_caches, engines),
    )


# Files ---------------------------------------------------------------------------------


def _text(cluster: Cluster, name: str, strftime: Callable[[str], str]) -> TextModel:
    section, folder = cluster.model[name], cluster.model_path(name)
    try:
        files = {file: (folder / file).read_bytes() for file in FILES if (folder / file).is_file()}
        template = None if section.template is None else (cluster.folder / section.template).read_text()
        return load(files, template, strftime=strftime)
    except (StartFailed, OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"model {name} in {folder}: {error}") from error
