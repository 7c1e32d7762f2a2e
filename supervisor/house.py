"""From a cluster's description to one node's tree: which children there are, and what is plugged into what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import trio
from attrs import asdict, define, frozen

from actors._kit import Address, Call, mailbox
from actors._text.model import FILES, TextModel, load
from actors.decode import Deadlines, decode
from actors.engines.port import Engine
from actors.engines.sglang.adapter import limit
from actors.engines.sglang.settings import EngineSpec
from actors.processor import Aside, TextReply, processor
from protocol.dialects.http import Model
from protocol.errors import RequestError, StartFailed
from protocol.messages import EngineInfo, EngineLoad, Finished, Generate, Respond, Started, Tokens
from supervisor import hosts
from supervisor.chatter import Chatter
from supervisor.config import Cluster, EngineSection
from supervisor.doors.asking import Asking, Served
from supervisor.doors.door import Door
from supervisor.doors.gate import Gate
from supervisor.engine import EngineHouse, engine
from supervisor.folders import Folder
from supervisor.gateway import gateway
from supervisor.metrics import Metrics
from supervisor.plug import Plug
from supervisor.process import Hurry, Ladder
from supervisor.tree import Backoff, Child, Strategy, Tree

WorkInbox: TypeAlias = trio.MemoryReceiveChannel[Call[Generate, Started | Tokens, Finished]]
AskedInbox: TypeAlias = trio.MemoryReceiveChannel[Call[Respond, TextReply, Finished]]

LOADS_WITHIN_S = 1.0
ZYGOTE_LADDER = Ladder(asked_s=0.5, term_s=0.5, kill_s=1.0)


@frozen
class World:
    """What a node may touch of the world: its folder, its environment, clock, chance, threads."""

    folder: Folder
    logs: Path
    environment: Mapping[str, str]
    new_id: Callable[[], str]
    now: Callable[[], float]
    strftime: Callable[[str], str]
    aside: Aside[list[int]]
    hurry: Hurry
    metrics: Metrics


@define(eq=False)
class House:
    """One node's tree, and the handles that the node's own tasks need."""

    tree: Tree
    door: Door


def build(cluster: Cluster, node: str, world: World) -> House:
    """Return the house of one node; raises `StartFailed` if a model's files cannot be used."""
    engines: dict[str, Plug[Engine]] = {name: Plug() for name in cluster.engines_on(node)}
    children: list[Child | Tree] = []
    starts = _starts(cluster, node, world, children)
    served: dict[str, Served] = {}
    processors = []
    for name, section in cluster.model.items():
        of_model = {key: each for key, each in cluster.engines_on(node).items() if each.model == name}
        work, work_inbox = _work(section.queue_max)
        for key, each in of_model.items():
            children.append(_worker(cluster, key, each, starts[each.device], engines[key], work_inbox, world))
        asked, asked_inbox = _asked(cluster.gateway.requests_max)
        plugs = [engines[key] for key in of_model]
        processors.append(
            Child(
                name=f"processor-{name.replace('/', ':')}",
                run=processor,
                args=(
                    asked_inbox,
                    _text(cluster, name, world.strftime),
                    work,
                    partial(_limits, plugs),
                    world.aside,
                    cluster.gateway.requests_max,
                ),
                about=f"conversations to tokens and back, for {name}",
                limits=(("requests", cluster.gateway.requests_max), ("queue", section.queue_max)),
            )
        )
        served[name] = Served(partial(_model, name, plugs, int(world.now())), asked, partial(_longest, plugs))
    door = _door(cluster, served, engines, world)
    # The gateway comes first and goes last: it says why nobody is served yet, and how the last ones ended.
    children = [_gateway(cluster, door), *children, *processors]
    about = f"node on {cluster.node[node].host}, drains for {cluster.node[node].drain_s:g} s"
    return House(Tree(name=node, children=tuple(children), restarts_max=5, restarts_window_s=300.0, about=about), door)


def _work(size: int) -> tuple[Address[Generate, Started | Tokens, Finished], WorkInbox]:
    return mailbox(size)


def _asked(size: int) -> tuple[Address[Respond, TextReply, Finished], AskedInbox]:
    return mailbox(size)


# Children ------------------------------------------------------------------------------


def _starts(cluster: Cluster, node: str, world: World, children: list[Child | Tree]) -> dict[str, hosts.Starts]:
    """Return how hosts are started on each kind of device, adding the zygote that a CPU's need."""
    zygote: Plug[hosts.Zygote] = Plug()
    if any(each.device == "cpu" for each in cluster.engines_on(node).values()):
        process = Child(
            name="process",
            run=hosts.zygote,
            args=(zygote, _chatter(cluster, node, world)("zygote"), world.hurry, ZYGOTE_LADDER, world.environment),
            start_within_s=120.0,
            stop_within_s=ZYGOTE_LADDER.total_s + 1.0,
            about="has imported SGLang once",
        )
        # A tree of its own: it is remade in the background, and its deaths are not counted with anybody else's.
        children.append(
            Tree(
                name="zygote",
                children=(process,),
                restarts_max=30,
                restarts_window_s=300.0,
                backoff=Backoff(min_s=1.0),
                about="forks the hosts of engines on a CPU",
            )
        )
    return {"cpu": hosts.forked(zygote), "cuda": hosts.spawned(world.environment, "cuda")}


def _worker(
    cluster: Cluster,
    name: str,
    section: EngineSection,
    starts: hosts.Starts,
    plug: Plug[Engine],
    inbox: WorkInbox,
    world: World,
) -> Tree:
    """Return an engine and the actor that gives it work: neither is any use without the other."""
    spec = _spec(cluster, name, section)
    chatter = _chatter(cluster, section.node, world)
    house = EngineHouse(world.folder, chatter, world.hurry, section.ladder)
    return Tree(
        name=name,
        strategy=Strategy.ONE_FOR_ALL,
        restarts_max=5,
        restarts_window_s=300.0,
        backoff=Backoff(min_s=0.1),
        about=f"{section.model} on {section.device}",
        children=(
            Child(
                name="engine",
                run=engine,
                args=(spec, starts, plug, house),
                start_within_s=section.start_within_s,
                stop_within_s=section.ladder.total_s + 1.0,
                about="SGLang, in a process of its own",
                limits=(("KV tokens", section.kv_tokens_max), ("slots", section.slots)),
            ),
            Child(
                name="decode",
                run=_decode,
                args=(inbox, plug, section.slots, section.deadlines),
                stop_within_s=section.deadlines.release_s + 1.0,
                about="one slot a request",
                limits=tuple((key.replace("_", " "), value) for key, value in asdict(section.deadlines).items()),
            ),
        ),
    )


async def _decode(  # noqa: ASYNC128  # decode calls started()
    inbox: WorkInbox,
    plug: Plug[Engine],
    slots: int,
    deadlines: Deadlines,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    await decode(inbox, await plug.wait(), slots, deadlines, task_status=task_status)


def _gateway(cluster: Cluster, door: Door) -> Child:
    section = cluster.gateway
    return Child(
        name="gateway",
        run=gateway,
        args=(door, section.host, section.port),
        stop_within_s=section.limits.close_s + 1.0,
        about=f"clients at http://{section.host}:{section.port}",
        limits=(
            ("requests", section.requests_max),
            ("waiting", section.waiting_max),
            ("admit s", section.admit_s),
            ("first token s", section.first_token_s),
            ("total s", section.total_s),
            *((key.replace("_", " "), value) for key, value in asdict(section.limits).items()),
        ),
    )


def _door(cluster: Cluster, served: Mapping[str, Served], engines: Mapping[str, Plug[Engine]], world: World) -> Door:
    section = cluster.gateway
    gate = Gate(section.requests_max, section.admit_s, section.waiting_max, partial(_never_ready, engines))
    asking = Asking(served, world.metrics, section.first_token_s, section.total_s)
    world.metrics.gauges |= {
        "espalier_requests_running": ("Requests being answered", lambda: {"gateway": gate.inside}),
        "espalier_requests_waiting": ("Requests that wait at the gate", lambda: {"gateway": gate.waiting}),
        "espalier_tasks": (
            "Tasks that live in the node",
            lambda: {"node": trio.lowlevel.current_statistics().tasks_living},
        ),
        "espalier_engine_up": ("Whether the engine can be asked", lambda: _up(engines)),
    }
    return Door(
        asking=asking,
        gate=gate,
        limits=section.limits,
        names=frozenset(section.names),
        unready=partial(_unready, engines),
        metrics_text=partial(_metrics, engines, world.metrics),
        new_id=world.new_id,
        now=world.now,
    )


# What is known of engines ----------------------------------------------------------------


def _never_ready(engines: Mapping[str, Plug[Engine]]) -> str | None:
    """Say which engine has not been ready yet: from then on, one that is being restarted is worth waiting for."""
    missing = [name for name, plug in engines.items() if plug.last is None]
    return f"engine {missing[0]} is still starting" if missing else None


def _unready(engines: Mapping[str, Plug[Engine]]) -> str | None:
    missing = [name for name, plug in engines.items() if plug.now is None]
    return f"engine {missing[0]} is starting" if missing else None


def _up(engines: Mapping[str, Plug[Engine]]) -> dict[str, float]:
    return {name: float(plug.now is not None) for name, plug in engines.items()}


async def _metrics(engines: Mapping[str, Plug[Engine]], metrics: Metrics) -> bytes:
    """Return the metrics with each engine's own count as it is now; one that does not answer in time is left out."""
    loads: dict[str, EngineLoad] = {}

    async def ask(name: str, asked: Engine) -> None:
        with trio.move_on_after(LOADS_WITHIN_S), suppress(RequestError):
            loads[name] = await asked.load()

    async with trio.open_nursery() as nursery:
        for name, plug in engines.items():
            if plug.now is not None:
                nursery.start_soon(ask, name, plug.now)
    return metrics.text(loads)


def _limits(plugs: Sequence[Plug[Engine]]) -> tuple[EngineInfo, int] | None:
    """Return the engine that holds least, since any of them may get a request, and what it gives one request."""
    known = [plug.last.info for plug in plugs if plug.last is not None]
    return min(((info, limit(info)) for info in known), key=lambda pair: pair[1], default=None)


def _longest(plugs: Sequence[Plug[Engine]]) -> int:
    known = _limits(plugs)
    return 0 if known is None else known[1]


def _model(name: str, plugs: Sequence[Plug[Engine]], created: int) -> Model:
    known = _limits(plugs)
    return Model(
        id=name,
        created=created,
        root=name,
        max_model_len=0 if known is None else known[1],
        honours_seed=known is not None and known[0].honours_seed,
    )


# Files ---------------------------------------------------------------------------------


def _spec(cluster: Cluster, name: str, section: EngineSection) -> EngineSpec:
    return EngineSpec(
        name=name,
        model_path=str(cluster.model_path(section.model)),
        device=section.device,
        slots=section.slots,
        kv_tokens_max=section.kv_tokens_max,
        context_max=section.context_max,
        page_size=section.page_size,
        tensor_parallel=section.tensor_parallel,
        memory_fraction=section.memory_fraction,
        prefill_chunk=section.prefill_chunk,
        settings=section.settings,
        environment=section.environment,
    )


def _chatter(cluster: Cluster, node: str, world: World) -> Callable[[str], Chatter]:
    section = cluster.node[node]
    return lambda name: Chatter(world.logs / f"{name}.log", section.chatter_bytes_max, kept=section.logs is not None)


def _text(cluster: Cluster, name: str, strftime: Callable[[str], str]) -> TextModel:
    section, folder = cluster.model[name], cluster.model_path(name)
    try:
        files = {file: (folder / file).read_bytes() for file in FILES if (folder / file).is_file()}
        template = None if section.template is None else (cluster.folder / section.template).read_text()
        return load(files, template, strftime=strftime)
    except (StartFailed, OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"model {name} in {folder}: {error}") from error
