"""The children of SGLang's engines on one node: their hosts, and what these share.

A host is a process, since SGLang blocks its interpreter for seconds and dies by killing its group. On a CPU it is
forked from a zygote that has imported SGLang once; with CUDA it is spawned, because CUDA cannot be forked. Zygotes and
grammar checkers are trees of their own beside the engines, and never their parents: the death of a zygote leaves its
forked hosts alone, and the death of a checker costs no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import trio
from attrs import define, evolve, field

from actors.engines.sglang.spec import SglangSpec
from actors.kit.calls import Address, Askable, Inbox, mailbox
from protocol.messages.engine import Done, HandOff
from protocol.messages.kind import Message
from protocol.messages.operations import RankStarted, RunRank
from supervisor.config.schema import Cluster
from supervisor.engines.host.life import LADDER, HostRuntime
from supervisor.engines.kind import EngineChild, KindChildren, NodeContext
from supervisor.engines.sglang import grammar_checkers, ranks, spawn
from supervisor.engines.sglang.bootstrap_addresses import BootstrapAddresses
from supervisor.engines.sglang.bootstrap_ports import BootstrapPorts, NextPort, ports
from supervisor.engines.sglang.engine import (
    run_embedder,
    run_encoder,
    run_engine,
    run_follower_host,
)
from supervisor.engines.sglang.section import SHARED_ZYGOTE, SglangSection
from supervisor.engines.work import LocalEmbedder, LocalEncoder, LocalEngine
from supervisor.links.serving import Services
from supervisor.processes.process import Ladder
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Tree

ZYGOTE_LADDER = Ladder(stop_s=0.5, term_s=0.5, kill_s=1.0)


def sglang_children(context: NodeContext) -> KindChildren:
    """Return how SGLang's engines of a node are run, its ranks of engines of other nodes among them."""
    node = SglangNode(context)
    zygotes = tuple(node.zygote(name, registration) for name, registration in node.zygotes.items())
    followers, served = node.followers()
    checkers, checks = grammar_checkers.checkers(context, node.spec, node.host_runtime, node.starters)
    return KindChildren(
        engine=node.engine,
        encoder=node.encoder,
        embedder=node.embedder,
        before=(*zygotes, *followers),
        after=checkers,
        served={**served, **checks},
        published=node.zygotes,
    )


@define(eq=False)
class SglangNode:
    """One node's SGLang engines: how each host is started, and by which zygote.

    An engine with variables of its own has a zygote of its own: some are read when torch is imported, and never again.
    """

    context: NodeContext
    starters: dict[str, spawn.HostStarter] = field(init=False, factory=dict)  # by the name of the engine
    zygotes: dict[str, Registration[spawn.Zygote]] = field(init=False, factory=dict)  # by the name of the child
    environments: dict[str, Mapping[str, str]] = field(init=False, factory=dict)  # of the zygotes

    def __attrs_post_init__(self) -> None:
        for name, section in self.context.cluster.engines_of(SglangSection).items():
            if self.context.node not in section.nodes:
                continue
            zygote = spawn.zygote_name(name, section)
            if zygote is None:
                self.starters[name] = spawn.spawn_starter(self.context.runtime.environment, "cuda")
                continue
            self.environments.setdefault(zygote, section.environment)
            self.starters[name] = spawn.fork_starter(self.zygotes.setdefault(zygote, Registration()))

    def zygote(self, name: str, registration: Registration[spawn.Zygote]) -> Tree:
        """Return a zygote in a tree of its own, so that its restarts count against no other child."""
        runtime, environment = self.context.runtime, self.environments[name]
        output_log, command = self.context.output_log(name), spawn.ZYGOTE_COMMAND
        process = Child(
            name="process",
            run=spawn.zygote,
            args=(registration, output_log, runtime.grace, ZYGOTE_LADDER, runtime.environment, command, environment),
            start_within_s=120.0,
            stop_within_s=ZYGOTE_LADDER.total_s + 1.0,
            about="has imported SGLang once",
        )
        own = name.removeprefix(f"{SHARED_ZYGOTE}-") if environment else "engines on a CPU"
        return Tree(
            name=name,
            children=(process,),
            restarts_max=None,
            backoff=Backoff(min_s=0.5, crashes=True),
            about=f"forks the hosts of {own}",
        )

    def engine(self, local: LocalEngine) -> EngineChild:
        """Return the child that runs rank 0 of an engine, and asks other nodes for the other ranks."""
        section, cluster = local.section, self.context.cluster
        assert isinstance(section, SglangSection)
        host_runtime, next_port = self.host_runtime(section), self._next_port(local, section)
        run_host = partial(_run_present, self.context.cluster, local, self.starters[local.name], host_runtime)
        followers = self._follower_ranks(local, section) if section.ranks_on else None
        process = "SGLang" if followers is None else "SGLang's rank 0"
        linked_within_s = 0.0 if followers is None else followers.linked_within_s
        child = Child(
            name="engine",
            run=_alone if followers is None else followers.run_all,
            args=(run_host, next_port),
            start_within_s=linked_within_s + section.start_within_s,
            stop_within_s=LADDER.total_s + 1.0,
            about=f"{process}, in a process of its own",
            limits=(
                *((("ranks", section.data_parallel),) if section.data_parallel > 1 else ()),
                *(("KV tokens", section.kv_tokens_max), ("slots", section.slots), ("silent s", section.silence_s)),
            ),
        )
        about = f"on {section.device}{all_ranks(cluster, local.name)}"
        zygote = spawn.zygote_name(local.name, section)
        return EngineChild(
            child,
            about,
            () if zygote is None else (zygote,),
            0.1 if followers is None else 1.0,
            BootstrapAddresses().reach,
        )

    def encoder(self, local: LocalEncoder) -> EngineChild:
        """Return the child that runs an encoder."""
        section = local.section
        assert isinstance(section, SglangSection)
        child = Child(
            name="engine",
            run=run_encoder,
            args=(self.spec(local.name), self.starters[local.name], local.registration, self.host_runtime(section)),
            start_within_s=section.start_within_s,
            stop_within_s=LADDER.total_s + 1.0,
            about="SGLang's vision tower, in a process of its own",
            limits=(("items of a batch", section.encoder.batch_max), ("silent s", section.silence_s)),
        )
        zygote = spawn.zygote_name(local.name, section)
        return EngineChild(child, f"on {section.device}", () if zygote is None else (zygote,))

    def embedder(self, local: LocalEmbedder) -> EngineChild:
        """Return the child that runs an embedder."""
        section = local.section
        assert isinstance(section, SglangSection)
        child = Child(
            name="engine",
            run=run_embedder,
            args=(self.spec(local.name), self.starters[local.name], local.registration, self.host_runtime(section)),
            start_within_s=section.start_within_s,
            stop_within_s=LADDER.total_s + 1.0,
            about="SGLang, in a process of its own",
            limits=(
                ("KV tokens", section.kv_tokens_max),
                ("slots", section.slots),
                ("silent s", section.silence_s),
            ),
        )
        zygote = spawn.zygote_name(local.name, section)
        return EngineChild(child, f"on {section.device}", () if zygote is None else (zygote,))

    def followers(self) -> tuple[tuple[Child, ...], Services]:
        """Return this node's follower ranks, of engines with rank 0 elsewhere, and their services for that node.

        They start before this node's own engines: these may have to wait for a node that waits for the followers.
        """
        children: list[Child] = []
        serves: dict[tuple[str, type[Message]], Askable[Message, Message, Message]] = {}
        for name in self.context.cluster.follower_ranks_on(self.context.node):
            address: Address[RunRank, RankStarted, Done]
            address, inbox = mailbox(1)
            serves[name, RunRank] = cast("Askable[Message, Message, Message]", address)
            children.append(self.follower(name, inbox))
        return tuple(children), serves

    def follower(self, name: str, inbox: Inbox[ranks.RankCall]) -> Child:
        """Return the child for this node's follower rank of an engine."""
        cluster, directory = self.context.cluster, self.context.directory
        section = cluster.engine[name]
        assert isinstance(section, SglangSection)
        spec = self.spec(name, section.nodes.index(directory.name))
        run_host = partial(run_follower_host, spec, self.starters[name], self.host_runtime(section))
        return Child(
            name=name,
            run=ranks.run_follower_rank,
            args=(inbox, ranks.LocalRank(directory, ranks.shared_keys(cluster, name), ports(spec)), run_host),
            stop_within_s=LADDER.total_s + 1.0,
            about=f"rank {spec.rank} of {section.model} on {section.device}{all_ranks(cluster, name)}",
            limits=(("KV tokens", section.kv_tokens_max), ("slots", section.slots)),
        )

    def spec(self, name: str, rank: int = 0) -> SglangSpec:
        """Return the description of one rank's host."""
        return spec_of(self.context.cluster, name, rank)

    def host_runtime(self, section: SglangSection) -> HostRuntime:
        """Return what all hosts of this node share, with the times of this engine."""
        runtime = self.context.runtime
        return HostRuntime(
            runtime.folder,
            self.context.output_log,
            runtime.grace,
            LADDER,
            runtime.now,
            section.silence_s,
            self.context.shared,
            reserve=runtime.reserve,
        )

    def _next_port(self, local: LocalEngine, section: SglangSection) -> NextPort:
        """Return the function that chooses the bootstrap port of a life, None unless that is one of a prefill."""
        spec = evolve(self.spec(local.name), bootstrap_port=section.bootstrap_port)
        lives = BootstrapPorts(spec, self.context.runtime.now)

        async def next_port() -> int | None:
            await trio.lowlevel.checkpoint()
            return await lives.next_port() if local.section.leg == "prefill" else None

        return next_port

    def _follower_ranks(self, local: LocalEngine, section: SglangSection) -> ranks.FollowerRanks:
        cluster, directory = self.context.cluster, self.context.directory
        return ranks.FollowerRanks(
            engine=local.name,
            nodes=section.ranks_on,
            agreed=ranks.shared_keys(cluster, local.name),
            directory=directory,
            linked_within_s=section.start_within_s,
            registration=local.registration,
            gateways=frozenset(cluster.gateway_nodes),
        )


async def _run_present(  # noqa: ASYNC128  # run_engine calls started()
    cluster: Cluster,
    local: LocalEngine,
    start_host: spawn.HostStarter,
    runtime: HostRuntime,
    port: int | None,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    """Run one life of an engine with its present role."""
    spec = spec_of(cluster.with_engine(local.name, local.section), local.name)
    await run_engine(spec, start_host, local.registration, runtime, port, task_status=task_status)


async def _alone(  # noqa: ASYNC128  # run_host calls started()
    run_host: ranks.RunHost, next_port: NextPort, *, task_status: trio.TaskStatus[None]
) -> None:
    await run_host(await next_port(), task_status=task_status)


def all_ranks(cluster: Cluster, name: str) -> str:
    """Return the nodes of an engine's ranks, as the end of a sentence: nothing for an engine on one node."""
    nodes = cluster.engine[name].nodes
    return f", over nodes {', '.join(nodes)}, which meet at {ranks.rank0_address(cluster, name)}" if nodes[1:] else ""


def spec_of(cluster: Cluster, name: str, rank: int = 0) -> SglangSpec:
    """Return the description of the host of one rank of an engine."""
    section = cluster.engine[name]
    assert isinstance(section, SglangSection)
    assert section.device is not None  # the configuration has been checked
    return SglangSpec(
        name=f"{name}.rank-{rank}" if rank else name,
        model_path=str(cluster.model_path(section.model)),
        device=section.device,
        slots=section.slots,
        kv_tokens_max=section.kv_tokens_max,
        context_max=section.context_max,
        page_size=section.page_size,
        tensor_parallel=section.tensor_parallel,
        data_parallel=section.data_parallel,
        memory_fraction=section.memory_fraction,
        prefill_chunk=section.prefill_chunk,
        leg=section.worker_leg,
        task=None if section.task == "generate" else section.task,
        host=ranks.host_address(cluster.node[section.nodes[rank]].host),
        bootstrap_port=section.bootstrap_port if section.leg == "prefill" else None,
        sequential=cluster.model[section.model].hand_off == HandOff.SEQUENTIAL,
        transfer=section.transfer,
        nodes=len(section.nodes),
        rank=rank,
        dist_init_address=ranks.rank0_address(cluster, name),
        settings=section.settings,
        environment=section.environment,
        has_tower=section.has_tower(cluster),
        batch_max=section.encoder.batch_max,
        publishes=section.publishes(cluster),
        events_address=None if section.events.listen is None else str(section.events.listen),
        events_replay_address=None if section.events.replay is None else str(section.events.replay),
        metrics=section.metrics,
        traces=cluster.tracing.url if cluster.tracing.engines else None,
        experts=section.experts.arguments(cluster.folder),
        diffusion=section.diffusion,
        diffusion_settings=section.diffusion_settings.arguments,
        expert_ranks=section.experts.ranks_recorded if section.experts.record else 0,
        adapters=None if section.adapters is None else section.adapters.limits(cluster.folder),
    )
