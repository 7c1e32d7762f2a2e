"""The children of simulated engines and encoders: one each, in the node's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

import trio

from actors.engines.encoder_port import Encoder
from actors.engines.port import Engine
from actors.engines.simulated.encoder import SimulatedEncoder
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.faults import Chance
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.sentences import SENTENCES
from actors.engines.simulated.spec import SimulatedSpec
from actors.text.model import TextModel
from protocol.cluster import Leg
from protocol.errors import StartFailed
from protocol.media import MediaForm, MediaInfo
from supervisor.config.schema import EngineSection
from supervisor.engines.kind import EngineChild, KindChildren, NodeContext
from supervisor.engines.simulated.event_batches import KEPT_BYTES_MAX, KEPT_MAX, EventBatches
from supervisor.engines.simulated.section import SimulatedMedia, SimulatedSection
from supervisor.engines.work import LocalEncoder, LocalEngine
from supervisor.links.endpoint import Endpoint
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Tree

CLOSE_S = 1.0  # for the sockets of one engine


def simulated_children(context: NodeContext) -> KindChildren:
    """Return how the simulated engines of a node are run; its prefills and its decodes meet each other."""
    told = {
        name: EventBatches(section.page_size, context.runtime.now)
        for name, section in context.cluster.engines_on(context.node).items()
        if isinstance(section, SimulatedSection) and section.events.listen is not None
    }
    return KindChildren(
        partial(_engine, context, RendezvousRooms(), told),
        partial(_encoder, context),
        after=_event_children(context, told),
    )


def _event_children(context: NodeContext, told: Mapping[str, EventBatches]) -> tuple[Tree, ...]:
    """Return the children that publish events for outsiders, in a tree of their own: they fail no engine."""
    children = list[Child]()
    for name, batches in told.items():
        events = context.cluster.engine[name].events
        child = Child(
            name=f"zmq-{name}",
            run=_publish,
            args=(batches, events.listen, events.replay),
            stop_within_s=2 * CLOSE_S,
            about=f"its events by ZMQ, for anybody, at {events.listen}",
            limits=(("batches kept", KEPT_MAX), ("bytes kept", KEPT_BYTES_MAX)),
        )
        children.append(child)
    if not children:
        return ()
    backoff = Backoff(crashes=True)
    return (Tree(name="event-sockets", children=tuple(children), restarts_max=None, backoff=backoff, needs=()),)


async def _publish(  # noqa: ASYNC128  # publish calls started()
    batches: EventBatches, listen: Endpoint, replay: Endpoint | None, *, task_status: trio.TaskStatus[None]
) -> None:
    from supervisor.engines.simulated.event_sockets import publish  # noqa: PLC0415  # it needs pyzmq, others do not

    await publish(batches, listen, replay, task_status=task_status)


def check_host(name: str, section: EngineSection) -> None:
    """Raise `StartFailed` if an engine is to publish events, and this Python cannot."""
    if section.events.listen is not None and find_spec("zmq") is None:
        raise StartFailed(f"engine {name} publishes its events by ZMQ, for which pyzmq is missing: pip install pyzmq")


def _engine(
    context: NodeContext, rendezvous_rooms: RendezvousRooms, told: Mapping[str, EventBatches], local: LocalEngine
) -> EngineChild:
    section, model = local.section, local.text
    assert isinstance(section, SimulatedSection)
    assert model is not None  # the section says that it reads text
    eos_id = min(model.eos_token_ids, default=None)
    form = MediaForm.EMBEDDINGS if context.cluster.encodes(section.model) else MediaForm.PIXELS
    spec = _spec(section, model.tokenizer.get_vocab_size(), eos_id, _media(section, model, form))
    sentences = tuple(tuple(model.encode_text(f" {sentence}", special=False)) for sentence in SENTENCES)
    simulated = partial(
        SimulatedEngine,
        spec,
        sentences=sentences,
        digest=model.digest,
        rendezvous_rooms=rendezvous_rooms,
        publishes=section.publishes(context.cluster),
        tell=told[local.name].put if local.name in told else None,
    )
    child = Child(
        name="engine",
        run=_run,
        args=(simulated, partial(context.runtime.chance, spec.seed), local.registration),
        about="simulated: sends sentences at a configured pace",
        limits=(
            *((("ranks", section.data_parallel),) if section.data_parallel > 1 else ()),
            ("KV tokens", section.kv_tokens_max),
            ("slots", section.slots),
        ),
    )
    return EngineChild(child, about="simulated")


def _encoder(context: NodeContext, local: LocalEncoder) -> EngineChild:
    section = local.section
    assert isinstance(section, SimulatedSection)
    own, batch_max, model = section.simulated, section.encoder.batch_max, local.text
    assert model is not None  # an encoder's node reads it
    if (media := _media(section, model, MediaForm.EMBEDDINGS)) is None:
        raise StartFailed(f"engine {local.name} has nothing to encode: {section.model} takes no images and no videos")
    simulated = partial(
        SimulatedEncoder,
        media,
        batch_max,
        costs=own.encoding_costs,
        faults=own.faults,
        digest=model.digest,
    )
    child = Child(
        name="engine",
        run=_run_encoder,
        args=(simulated, partial(context.runtime.chance, own.seed), local.registration),
        about="simulated: makes embeddings at a configured pace",
        limits=(("slots", section.slots), ("items of a batch", batch_max)),
    )
    return EngineChild(child, about="simulated")


def _spec(
    section: SimulatedSection, vocabulary_size: int, eos_id: int | None, media: MediaInfo | None
) -> SimulatedSpec:
    own = section.simulated
    return SimulatedSpec(
        leg=Leg(section.leg),
        ranks=section.data_parallel,
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
        media=media,
        costs=own.costs,
        faults=own.faults,
    )


def _media(section: SimulatedSection, model: TextModel, form: MediaForm) -> MediaInfo | None:
    """Return the images and videos that an engine takes: as its section states, else as its model does."""
    own, layout = section.simulated.media, model.vision
    if own is None and layout is not None:
        own = SimulatedMedia(image_token=layout.image_token, video_token=layout.video_token, merge=layout.merge)
    return None if own is None else own.info(form)


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


async def _run_encoder(  # noqa: ASYNC128  # run calls started()
    encoder: Callable[[Chance], SimulatedEncoder],
    chance: Callable[[], Chance],
    registration: Registration[Encoder],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    simulated = encoder(chance())
    with registration.publish(simulated):
        await simulated.run(task_status=task_status)
