"""The children of TensorRT-LLM's engines on one node: one host each, which is spawned, since CUDA cannot be forked."""

from __future__ import annotations

from functools import partial

import trio

from actors.engines.trtllm.spec import TrtllmSpec
from supervisor.config.schema import Cluster
from supervisor.engines.host.life import LADDER, HostRuntime
from supervisor.engines.kind import EngineChild, KindChildren, NodeContext
from supervisor.engines.trtllm.engine import run_encoder, run_engine
from supervisor.engines.trtllm.section import TrtllmSection
from supervisor.engines.work import LocalEncoder, LocalEngine
from supervisor.supervision.tree import Child


def trtllm_children(context: NodeContext) -> KindChildren:
    """Return how TensorRT-LLM's engines of a node are run."""
    return KindChildren(partial(_engine, context), partial(_encoder, context))


def _engine(context: NodeContext, local: LocalEngine) -> EngineChild:
    section = local.section
    assert isinstance(section, TrtllmSection)
    child = Child(
        name="engine",
        run=_run,
        args=(context, local, _host_runtime(context, section)),
        start_within_s=section.start_within_s,
        stop_within_s=LADDER.total_s + 1.0,
        about="TensorRT-LLM, in a process of its own",
        limits=(
            *((("ranks", section.data_parallel),) if section.data_parallel > 1 else ()),
            ("KV tokens", section.kv_tokens_max),
            ("slots", section.slots),
            ("silent s", section.silence_s),
        ),
    )
    return EngineChild(child, f"on {section.device}")


def _encoder(context: NodeContext, local: LocalEncoder) -> EngineChild:
    section = local.section
    assert isinstance(section, TrtllmSection)
    environment = context.runtime.environment
    spec, runtime = spec_of(context.cluster, local.name), _host_runtime(context, section)
    child = Child(
        name="engine",
        run=run_encoder,
        args=(spec, section.python, environment, local.registration, runtime),
        start_within_s=section.start_within_s,
        stop_within_s=LADDER.total_s + 1.0,
        about="TensorRT-LLM's encoder, in a process of its own",
        limits=(("items of a batch", section.encoder.batch_max), ("silent s", section.silence_s)),
    )
    return EngineChild(child, f"on {section.device}")


async def _run(  # noqa: ASYNC128  # run_engine calls started()
    context: NodeContext, local: LocalEngine, runtime: HostRuntime, *, task_status: trio.TaskStatus[None]
) -> None:
    """Run one life of an engine with its present role."""
    section = local.section
    assert isinstance(section, TrtllmSection)
    spec = spec_of(context.cluster.with_engine(local.name, section), local.name)
    environment = context.runtime.environment
    await run_engine(spec, section.python, environment, local.registration, runtime, task_status=task_status)


def _host_runtime(context: NodeContext, section: TrtllmSection) -> HostRuntime:
    runtime = context.runtime
    return HostRuntime(
        runtime.folder,
        context.output_log,
        runtime.grace,
        LADDER,
        runtime.now,
        section.silence_s,
        context.shared,
        reserve=runtime.reserve,
    )


def spec_of(cluster: Cluster, name: str) -> TrtllmSpec:
    """Return the description of an engine's host."""
    section = cluster.engine[name]
    assert isinstance(section, TrtllmSection)
    return TrtllmSpec(
        name=name,
        model_path=str(cluster.model_path(section.model)),
        slots=section.slots,
        kv_tokens_max=section.kv_tokens_max,
        context_max=section.context_max,
        page_size=section.page_size,
        tensor_parallel=section.tensor_parallel,
        data_parallel=section.data_parallel,
        memory_fraction=section.memory_fraction,
        prefill_chunk=section.prefill_chunk,
        leg=section.worker_leg,
        transfer=section.transfer,
        has_tower=section.has_tower(cluster),
        batch_max=section.encoder.batch_max,
        publishes=section.publishes(cluster),
        releases_memory=section.releases_memory,
        adapters=None if section.adapters is None else section.adapters.limits(cluster.folder),
        settings=section.settings,
        environment=section.environment,
    )
