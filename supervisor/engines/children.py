"""The children that compute: engines of either kind, the zygote that some need, and the actors that give them work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import trio
from attrs import asdict, frozen

from actors.decode import decode
from actors.engines.port import Engine
from actors.engines.sglang.boot_message import SglangSpec
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.sentences import SENTENCES
from actors.engines.simulated.spec import SimulatedSpec
from actors.engines.slots import SlotObserver
from actors.kit.calls import Inbox
from actors.kit.priority_inbox import PriorityInbox
from actors.prefill import prefill
from actors.text.model import TextModel
from protocol.cluster import Leg, Offer
from protocol.errors import StartFailed
from protocol.messages import Finished, Generate, Started, Tokens
from protocol.model_folder import Digest, mismatch
from supervisor.cluster.directory import Directory
from supervisor.config.load import Cluster, EngineSection
from supervisor.engines import grammar_checkers
from supervisor.engines.sglang import bootstrap_ports, ranks, spawn
from supervisor.engines.sglang.engine import HostRuntime, engine, silent
from supervisor.links.serving import Services
from supervisor.processes.output_log import OutputLog, output_writer
from supervisor.processes.process import Ladder
from supervisor.runtime import Runtime
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Strategy, Tree

Work: TypeAlias = PriorityInbox[Generate, Started | Tokens, Finished]

ZYGOTE_LADDER = Ladder(stop_s=0.5, term_s=0.5, kill_s=1.0)


def starts(
    cluster: Cluster,
    node: str,
    world: Runtime,
    children: list[Child | Tree],
    zygotes: dict[str, Registration[spawn.Zygote]],
) -> dict[str, spawn.HostStarter]:
    """Return how the host of each engine is started, adding the zygotes that those on a CPU need.

    An engine with variables of its own has a zygote of its own: some are read when torch is imported, and never again.
    """
    found: dict[str, spawn.HostStarter] = {}
    for name, section in cluster.engine.items():
        if node not in section.nodes or section.kind != "sglang":
            continue
        if (zygote := spawn.zygote_name(name, section)) is None:
            found[name] = spawn.spawned(world.environment, "cuda")
            continue
        if zygote not in zygotes:
            zygotes[zygote] = Registration()
            children.append(_zygote(cluster, node, world, zygote, zygotes[zygote], section.environment))
        found[name] = spawn.forked(zygotes[zygote])
    return found


def _zygote(
    cluster: Cluster,
    node: str,
    world: Runtime,
    name: str,
    plug: Registration[spawn.Zygote],
    environment: Mapping[str, str],
) -> Tree:
    """Return a zygote in a tree of its own: it is remade in the background, and not counted with anybody else."""
    chatter = chatter_of(cluster, node, world)(name)
    process = Child(
        name="process",
        run=spawn.zygote,
        args=(plug, chatter, world.hurry, ZYGOTE_LADDER, world.environment, spawn.ZYGOTE, environment),
        start_within_s=120.0,
        stop_within_s=ZYGOTE_LADDER.total_s + 1.0,
        about="has imported SGLang once",
    )
    engine = name.removeprefix(f"{spawn.SHARED_ZYGOTE}-") if environment else "engines on a CPU"
    return Tree(
        name=name,
        children=(process,),
        restarts_max=None,
        backoff=Backoff(min_s=0.5, crashes=True),
        about=f"forks the hosts of {engine}",
    )


@frozen
class Worker:
    """One engine to be, and what its model, its node and its siblings give it."""

    name: str
    section: EngineSection
    model: TextModel | None  # for a simulated engine to speak by
    plug: Registration[Engine]
    inbox: Work
    came: Callable[[], None]  # to be called when the engine is there: what waits for its siblings may come to it
    turn_away: Callable[[], None]  # what waits in the inbox for an engine that is gone
    others: ranks.Others | None = None  # of an engine that spans nodes
    digest: Digest = ()  # of the model as this node has read it


def offer(name: str, section: EngineSection) -> Offer:
    """Return what an engine will be to others."""
    pending_max = section.pending_prefill_max
    leg, slots = Leg(section.leg), section.slots
    return Offer(name, section.model, leg, slots, up=False, pending_prefill_tokens_max=pending_max)


def worker(cluster: Cluster, each: Worker, hosts_of: Mapping[str, spawn.HostStarter], world: Runtime) -> Tree:
    """Return an engine and the actor that gives it work: neither is any use without the other."""
    section = each.section
    on = f"on {section.device}" if section.device else "simulated"
    over = _all_ranks(cluster, each.name) if section.ranks_on else ""
    pending_max = section.pending_prefill_max
    return Tree(
        name=each.name,
        strategy=Strategy.ONE_FOR_ALL,
        # Whatever is wrong with an engine, it is alone in it: it is tried again for ever, at most every half minute.
        restarts_max=None,
        backoff=Backoff(min_s=0.1 if each.others is None else 1.0, crashes=True),
        needs=tuple(filter(None, [spawn.zygote_name(each.name, section)])),
        about=f"{section.model} {on}{over}",
        children=(
            _simulated(each, world) if section.kind == "simulated" else _sglang(cluster, each, hosts_of, world),
            Child(
                name="prefill" if section.leg == "prefill" else "decode",
                run=_prefill if section.leg == "prefill" else _decode,
                args=(each, world.metrics.decode(f"{section.node}/{each.name}")),
                stop_within_s=section.deadlines.release_s + 1.0,
                about="one slot a prompt" if section.leg == "prefill" else "one slot a request",
                limits=(
                    *((key.replace("_", " "), value) for key, value in asdict(section.deadlines).items()),
                    *((("pending prefill tokens", pending_max),) if pending_max else ()),
                ),
            ),
        ),
    )


def _sglang(cluster: Cluster, each: Worker, hosts_of: Mapping[str, spawn.HostStarter], world: Runtime) -> Child:
    section, others = each.section, each.others
    assert section.device is not None  # the configuration has been checked
    spec = _spec(cluster, each.name, section, section.device)
    house = _house(cluster, section.node, section, world)
    keep = partial(engine, spec, hosts_of[each.name], each.plug, house)
    return Child(
        name="engine",
        run=_alone if others is None else others.together,
        args=(keep, bootstrap_ports.BootstrapPorts(spec, house.now).another),
        start_within_s=section.start_within_s if others is None else others.linked_within_s + section.start_within_s,
        stop_within_s=section.ladder.total_s + 1.0,
        about="SGLang, in a process of its own" if others is None else "SGLang's rank 0, in a process of its own",
        limits=(("KV tokens", section.kv_tokens_max), ("slots", section.slots), ("silent s", section.silent_s)),
    )


async def _alone(  # noqa: ASYNC128  # keep calls started()
    keep: ranks.Keeps, another: Callable[[], int | None], *, task_status: trio.TaskStatus[None]
) -> None:
    await keep(another(), task_status=task_status)


def follower_child(
    cluster: Cluster,
    name: str,
    directory: Directory,
    inbox: Inbox[ranks.Asked],
    hosts_of: Mapping[str, spawn.HostStarter],
    world: Runtime,
) -> Child:
    """Return what runs a node's rank of an engine whose first rank is on another node."""
    section = cluster.engine[name]
    assert section.device is not None  # the configuration has been checked
    spec = _spec(cluster, name, section, section.device, section.nodes.index(directory.name))
    keep = partial(silent, spec, hosts_of[name], _house(cluster, directory.name, section, world))
    return Child(
        name=name,
        run=ranks.run_follower_rank,
        args=(inbox, ranks.Own(directory, ranks.agreed(cluster, name), bootstrap_ports.ports(spec)), keep),
        stop_within_s=section.ladder.total_s + 1.0,
        about=f"rank {spec.rank} of {section.model} on {section.device}{_all_ranks(cluster, name)}",
        limits=(("KV tokens", section.kv_tokens_max), ("slots", section.slots)),
    )


def _all_ranks(cluster: Cluster, name: str) -> str:
    nodes = cluster.engine[name].nodes
    return f", over nodes {', '.join(nodes)}, which meet at {ranks.meeting(cluster, name)}"


def _house(cluster: Cluster, node: str, section: EngineSection, world: Runtime) -> HostRuntime:
    chatter = chatter_of(cluster, node, world)
    return HostRuntime(world.folder, chatter, world.hurry, section.ladder, world.now, section.silent_s, world.reserve)


def _simulated(each: Worker, world: Runtime) -> Child:
    section, model = each.section, each.model
    assert model is not None
    own = section.simulated
    spec = SimulatedSpec(
        leg=Leg(section.leg),
        slots=section.slots,
        waiting_max=own.waiting_max,
        kv_tokens_max=section.kv_tokens_max,
        context_max=section.context_max or section.kv_tokens_max,
        page_size=section.page_size,
        prefill_chunk=section.prefill_chunk or own.prefill_chunk,
        prefix_cache=own.prefix_cache,
        vocabulary_size=model.tokenizer.get_vocab_size(),
        eos_id=min(model.eos_token_ids, default=None),
        length_min=own.length_min,
        length_max=own.length_max,
        seed=own.seed,
        costs=own.costs,
        faults=own.faults,
    )
    lines = tuple(tuple(model.encode_text(f" {line}", special=False)) for line in SENTENCES)
    return Child(
        name="engine",
        run=_simulate,
        args=(spec, lines, world, each.plug, model.digest),
        about="simulated: it says sentences at a stated pace",
        limits=(("KV tokens", section.kv_tokens_max), ("slots", section.slots)),
    )


async def _simulate(  # noqa: ASYNC128  # run calls started()
    spec: SimulatedSpec,
    lines: Sequence[Sequence[int]],
    world: Runtime,
    plug: Registration[Engine],
    digest: Digest,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    simulated = SimulatedEngine(spec, world.chance(spec.seed), lines, digest, world.rendezvous_rooms)
    with plug.publish(simulated):
        await simulated.run(task_status=task_status)


def grammar_checks(
    cluster: Cluster, node: str, hosts_of: Mapping[str, spawn.HostStarter], world: Runtime, children: list[Child | Tree]
) -> Services:
    """Return where the grammars of a node's engines are checked, adding the children that do it."""

    def spec_of(name: str) -> SglangSpec:
        section = cluster.engine[name]
        assert section.device is not None  # the configuration has been checked
        return _spec(cluster, name, section, section.device)

    house_of = partial(_house, cluster, node, world=world)
    serves, checkers = grammar_checkers.addresses(cluster, node, spec_of, house_of, hosts_of, world)
    children += checkers
    return serves


async def _decode(  # noqa: ASYNC128  # decode calls started()
    each: Worker,
    observer: SlotObserver,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    section = each.section
    async with _engine_of(each) as engine:
        most = section.pending_prefill_max
        await decode(each.inbox, engine, section.slots, section.deadlines, observer, most, task_status=task_status)


async def _prefill(  # noqa: ASYNC128  # prefill calls started()
    each: Worker,
    observer: SlotObserver,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    section = each.section
    async with _engine_of(each) as engine:
        await prefill(each.inbox, engine, section.slots, section.deadlines, observer, task_status=task_status)


@asynccontextmanager
async def _engine_of(each: Worker) -> AsyncIterator[Engine]:
    """Wait for a worker's engine; in the end, let what waits for it be asked elsewhere."""
    engine = await each.plug.wait()
    if (why := mismatch(each.digest, engine.info.digest)) is not None:  # the folder has changed since the node began
        raise StartFailed(f"engine {each.name} is not asked: {why}, from what this node read when it started")
    each.came()
    try:
        yield engine
    finally:
        each.turn_away()


def _spec(cluster: Cluster, name: str, section: EngineSection, device: str, rank: int = 0) -> SglangSpec:
    return SglangSpec(
        name=f"{name}.rank-{rank}" if rank else name,
        model_path=str(cluster.model_path(section.model)),
        device=device,
        slots=section.slots,
        kv_tokens_max=section.kv_tokens_max,
        context_max=section.context_max,
        page_size=section.page_size,
        tensor_parallel=section.tensor_parallel,
        memory_fraction=section.memory_fraction,
        grammars=section.grammars,
        prefill_chunk=section.prefill_chunk,
        leg=Leg(section.leg),
        host=ranks.host_address(cluster.node[section.nodes[rank]].host),
        bootstrap_port=section.bootstrap_port,
        transfer=section.transfer,
        nodes=len(section.nodes),
        rank=rank,
        meet=ranks.meeting(cluster, name),
        settings=section.settings,
        environment=section.environment,
    )


def chatter_of(cluster: Cluster, node: str, world: Runtime) -> Callable[[str], OutputLog]:
    """Return how a node's processes keep what they say; one thread a file writes, whoever's life it is."""
    section = cluster.node[node]

    def of(name: str) -> OutputLog:
        path, logs = world.logs / f"{name}.log", world.metrics.logs
        if name not in logs:
            logs[name] = output_writer(path, section.output_log_bytes_max, section.log_queue_bytes_max)
        return OutputLog(path, section.output_log_bytes_max, kept=section.logs is not None, file=logs[name])

    return of
