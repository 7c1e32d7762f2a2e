"""The children of simulated engines, encoders and embedders: one each, in the node's own process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio
from tokenizers import Tokenizer

from actors.engines import model_files
from actors.engines.embedding.port import Embedder
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.engines.simulated.embedder import SimulatedEmbedder
from actors.engines.simulated.encoder import SimulatedEncoder
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.sentences import SENTENCES
from actors.engines.simulated.spec import FaultDraws, SimulatedSpec
from actors.text.model import TextModel
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from protocol.messages.embedding import EmbeddingInfo, EmbeddingOutput, Pooling
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.media import MediaForm, MediaInfo
from supervisor.engines.kind import EngineChild, KindChildren, NodeContext
from supervisor.engines.simulated.section import SimulatedMedia, SimulatedSection
from supervisor.engines.work import LocalEmbedder, LocalEncoder, LocalEngine
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Child


def simulated_children(context: NodeContext) -> KindChildren:
    """Return how the simulated engines of a node are run; its prefills and its decodes meet each other."""
    states = HeldStates(context.runtime.new_id())
    return KindChildren(
        partial(_engine, context, RendezvousRooms(), states), partial(_encoder, context), partial(_embedder, context)
    )


def _engine(
    context: NodeContext, rendezvous_rooms: RendezvousRooms, states: HeldStates, local: LocalEngine
) -> EngineChild:
    section, model = local.section, local.text
    assert isinstance(section, SimulatedSection)
    assert model is not None  # the section says that it reads text
    eos_id = min(model.eos_token_ids, default=None)
    form = MediaForm.EMBEDDINGS if context.cluster.encodes(section.model) else MediaForm.PIXELS
    hand_off = HandOff(context.cluster.model[section.model].hand_off or HandOff.CONCURRENT)
    vocabulary_size, media = model.tokenizer.get_vocab_size(), _media(section, model, form)
    adapters = {} if section.adapters is None else section.adapters.folders(context.cluster.folder)
    sentences = tuple(tuple(model.encode_text(f" {sentence}", special=False)) for sentence in SENTENCES)

    def make(chance: FaultDraws) -> SimulatedEngine:
        present = local.section
        assert isinstance(present, SimulatedSection)
        return SimulatedEngine(
            _spec(present, vocabulary_size, eos_id, media, hand_off),
            chance,
            sentences=sentences,
            digest=model.digest,
            rendezvous_rooms=rendezvous_rooms,
            states=states,
            publishes=present.publishes(context.cluster),
            first_adapters=adapters,
        )

    child = Child(
        name="engine",
        run=_run,
        args=(make, partial(context.runtime.chance, section.simulated.seed), local.registration),
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


def _embedder(context: NodeContext, local: LocalEmbedder) -> EngineChild:
    section = local.section
    assert isinstance(section, SimulatedSection)
    own, slots, folder = section.simulated, section.slots, context.cluster.model_path(section.model)
    length_max = min(section.context_max or section.kv_tokens_max, section.kv_tokens_max)
    is_score = section.task == "score"
    info = EngineInfo(
        kind="simulated",
        version="1",
        vocabulary_size=_vocabulary_size(local.name, folder),
        context_max=length_max,
        kv_tokens_max=section.kv_tokens_max,
        request_tokens_max=length_max,
        running_max=slots,
        page_size=section.page_size,
        honours_seed=True,
        digest=model_files.model_digest(folder),
        embedding=EmbeddingInfo(
            output=EmbeddingOutput.SCORES if is_score else EmbeddingOutput.VECTORS,
            width=1 if is_score else own.width,
            pooling=Pooling.HEAD if is_score else Pooling.LAST,
            normalised=not is_score,
            is_matryoshka=not is_score,
        ),
    )
    simulated = partial(
        SimulatedEmbedder, info, own.waiting_max, costs=own.encoding_costs, faults=own.faults, seed=own.seed
    )
    child = Child(
        name="engine",
        run=_run_embedder,
        args=(simulated, partial(context.runtime.chance, own.seed), local.registration),
        about=f"simulated: makes {'scores' if is_score else 'vectors'} at a configured pace",
        limits=(("tokens of an item", length_max), ("slots", slots)),
    )
    return EngineChild(child, about="simulated")


def _vocabulary_size(name: str, folder: Path) -> int:
    """Return the size of a model's vocabulary; raises `StartFailed` if its tokenizer cannot be read."""
    file = folder / "tokenizer.json"
    try:
        return int(Tokenizer.from_file(str(file)).get_vocab_size())
    except Exception as error:  # tokenizers raises bare Exceptions
        raise StartFailed(f"engine {name} has no vocabulary: {file} cannot be read: {error}") from error


def _spec(
    section: SimulatedSection,
    vocabulary_size: int,
    eos_id: int | None,
    media: MediaInfo | None,
    hand_off: HandOff,
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
        hand_off=hand_off,
        adapters_max=0 if section.adapters is None else section.adapters.loaded_max,
        experts=own.experts,
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
    engine: Callable[[FaultDraws], SimulatedEngine],
    chance: Callable[[], FaultDraws],
    registration: Registration[Engine],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    simulated = engine(chance())  # in each life the same faults at the same moments
    with registration.publish(simulated):
        await simulated.run(task_status=task_status)


async def _run_embedder(  # noqa: ASYNC128  # run calls started()
    embedder: Callable[[FaultDraws], SimulatedEmbedder],
    chance: Callable[[], FaultDraws],
    registration: Registration[Embedder],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    simulated = embedder(chance())
    with registration.publish(simulated):
        await simulated.run(task_status=task_status)


async def _run_encoder(  # noqa: ASYNC128  # run calls started()
    encoder: Callable[[FaultDraws], SimulatedEncoder],
    chance: Callable[[], FaultDraws],
    registration: Registration[Encoder],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    simulated = encoder(chance())
    with registration.publish(simulated):
        await simulated.run(task_status=task_status)
