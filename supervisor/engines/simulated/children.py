"""The children of simulated engines: one each, in the node's own process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from actors.engines.port import Engine
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.faults import Chance
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.sentences import SENTENCES
from actors.engines.simulated.spec import SimulatedSpec
from protocol.cluster import Leg
from supervisor.engines.kind import EngineChild, KindChildren, NodeContext
from supervisor.engines.simulated.section import SimulatedSection
from supervisor.engines.work import LocalEngine
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Child


def simulated_children(context: NodeContext) -> KindChildren:
    """Return how the simulated engines of a node are run; its prefills and its decodes meet each other."""
    return KindChildren(partial(_engine, context, RendezvousRooms()))


def _engine(context: NodeContext, rendezvous_rooms: RendezvousRooms, local: LocalEngine) -> EngineChild:
    section, model = local.section, local.text
    assert isinstance(section, SimulatedSection)
    assert model is not None  # the section says that it reads text
    eos_id = min(model.eos_token_ids, default=None)
    spec = _spec(section, model.tokenizer.get_vocab_size(), eos_id)
    sentences = tuple(tuple(model.encode_text(f" {sentence}", special=False)) for sentence in SENTENCES)
    simulated = partial(
        SimulatedEngine, spec, sentences=sentences, digest=model.digest, rendezvous_rooms=rendezvous_rooms
    )
    child = Child(
        name="engine",
        run=_run,
        args=(simulated, partial(context.runtime.chance, spec.seed), local.registration),
        about="simulated: sends sentences at a configured pace",
        limits=(("KV tokens", section.kv_tokens_max), ("slots", section.slots)),
    )
    return EngineChild(child, about="simulated")


def _spec(section: SimulatedSection, vocabulary_size: int, eos_id: int | None) -> SimulatedSpec:
    own = section.simulated
    return SimulatedSpec(
        leg=Leg(section.leg),
        slots=section.slots,
        waiting_max=own.waiting_max,
        kv_tokens_max=section.kv_tokens_max,
        context_max=section.context_max or section.kv_tokens_max,
        page_size=section.page_size,
        prefill_chunk=section.prefill_chunk or own.prefill_chunk,
        prefix_cache=own.prefix_cache,
        vocabulary_size=vocabulary_size,
        eos_id=eos_id,
        length_min=own.length_min,
        length_max=own.length_max,
        seed=own.seed,
        costs=own.costs,
        faults=own.faults,
    )


async def _run(  # noqa: ASYNC128  # run calls started()
    engine: Callable[[Chance], SimulatedEngine],
    chance: Callable[[], Chance],
    registration: Registration[Engine],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    simulated = engine(chance())  # in each life the same faults at the same moments
    with registration.publish(simulated):
        await simulated.run(task_status=task_status)
