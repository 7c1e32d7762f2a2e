"""The computing children of a node: its engines, of any kind, and the actors in front of them.

An engine, its actor and its canary are one tree of children that start and end together, because none is of use without
the others: an engine without its actor gets no requests, and the running requests of a lost engine are lost. The parts
that a kind shares between its engines (a zygote, a grammar checker) are beside them, never inside: so the failure of
one engine is no other's. Nothing here may depend on the kind of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from attrs import asdict, evolve, frozen

from actors.engines.embedding.port import Embedder
from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.limits import EncoderLimits
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.engines.slots.deadlines import RELEASE_S
from actors.engines.slots.slots import Slots
from actors.kit.calls import Function
from actors.text.model import TextModel
from protocol.errors import NotReady
from protocol.messages.cluster import Leg, Offer, rank_name
from protocol.messages.operations import CheckGrammar
from protocol.messages.role import SetRole
from protocol.weights_record import FIRST_WEIGHTS
from supervisor.cluster import operations
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_life import EngineLife
from supervisor.cluster.workers import LocalWorker
from supervisor.config.schema import EngineSection
from supervisor.engines.actor_runs import run_canary, run_embedder, run_encoder, run_requests
from supervisor.engines.engine_role import EngineRole
from supervisor.engines.grammar_checks import accept_grammar
from supervisor.engines.kind import EngineChild, KindChildren, NodeContext, RetriedChild
from supervisor.engines.kinds import KINDS
from supervisor.engines.publishers import engine_publisher, publishers_tree
from supervisor.engines.set_role import set_role
from supervisor.engines.work import (
    LocalEmbedder,
    LocalEncoder,
    LocalEngine,
    RequestInbox,
    embed_inbox,
    encode_inbox,
    request_inbox,
)
from supervisor.links.serving import Services, under_name
from supervisor.observers import CanaryMetrics, EmbedderMetrics, EncoderMetrics, SlotMetrics
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Strategy, Tree


@frozen
class NodeEngines:
    """The engines of one node: their children in the order of their starts, and the ways to reach them."""

    children: tuple[Child | Tree, ...]
    engines: Mapping[str, Registration[Engine]]
    encoders: Mapping[str, Registration[Encoder]]
    embedders: Mapping[str, Registration[Embedder]]
    embeddings: Mapping[str, EmbeddingCache]  # each encoder's cache
    served: Services  # the services of each beside requests, by its name
    published: Mapping[str, RetriedChild]  # by the name of the child that comes and goes

    @property
    def every(self) -> operations.Engines:
        """The engines of every sort."""
        return {**self.engines, **self.encoders, **self.embedders}


@frozen(kw_only=True)
class _EngineParts:
    """One engine of any sort: how it is given requests, the services under its name, and its children."""

    local: LocalEngine | LocalEncoder | LocalEmbedder
    tree: Tree
    services: Services
    publisher: Child | None = None
    embeddings: EmbeddingCache | None = None  # an encoder's


def offers_of(name: str, section: EngineSection) -> list[Offer]:
    """Return the offers of an engine that is not up yet, one for each of its ranks, as other nodes get them."""
    ranks = section.data_parallel
    return [
        Offer(
            name=rank_name(name, rank, ranks),
            model=section.model,
            leg=section.worker_leg,
            slots=section.slots,
            up=False,
            pending_prefill_tokens_max=section.pending_prefill_max,
        )
        for rank in range(ranks)
    ]


def node_engines(context: NodeContext, texts: Mapping[str, TextModel]) -> NodeEngines:
    """Return the engines of a node, and add them to its directory; `texts` has the models whose text is read here."""
    kinds = {word: kind.children(context) for word, kind in KINDS.items()}
    parts: list[_EngineParts] = []
    for name, section in context.cluster.engines_on(context.node).items():
        kind, text = kinds[section.kind], texts.get(section.model)
        make = {Leg.ENCODE: _encoder, Leg.EMBED: _embedder}.get(section.worker_leg, _engine)
        parts.append(make(context, name, text, kind))
    engines = {part.local.name: part.local.registration for part in parts if isinstance(part.local, LocalEngine)}
    encoders = {part.local.name: part.local.registration for part in parts if isinstance(part.local, LocalEncoder)}
    embedders = {part.local.name: part.local.registration for part in parts if isinstance(part.local, LocalEmbedder)}
    return NodeEngines(
        children=(
            *(child for kind in kinds.values() for child in kind.before),
            *(part.tree for part in parts),
            *(child for kind in kinds.values() for child in kind.after),
            *publishers_tree([part.publisher for part in parts if part.publisher is not None]),
        ),
        engines=engines,
        encoders=encoders,
        embedders=embedders,
        embeddings={part.local.name: part.embeddings for part in parts if part.embeddings is not None},
        # A kind also serves ranks here of engines whose rank 0 is on another node.
        served={
            **{key: service for kind in kinds.values() for key, service in kind.served.items()},
            **{key: service for part in parts for key, service in part.services.items()},
        },
        published={
            **{name: registration for kind in kinds.values() for name, registration in kind.published.items()},
            **engines,
            **encoders,
            **embedders,
        },
    )


def of_kind(name: str, kind: KindChildren) -> Services:
    """Return the services that a kind brings under the name of one engine."""
    return {key: service for key, service in kind.served.items() if key[0] == name}


def _engine(context: NodeContext, name: str, text: TextModel | None, kind: KindChildren) -> _EngineParts:
    directory, section = context.directory, context.cluster.engine[name]
    slots, life = Registration[tuple[Slots, ...]](), Registration[EngineLife]()
    ranks, queue_max = section.data_parallel, context.cluster.model[section.model].queue_max
    address, inbox = request_inbox(queue_max) if ranks == 1 else request_inbox(queue_max, lambda request: request.rank)

    def on_change() -> None:
        directory.notify()
        inbox.recheck()  # requests that wait until the engine is in service again
        if registration.in_service:
            return
        for of_rank in slots.live or ():
            of_rank.cancel_probe("the engine is out of service")
        workers[0].reroute_queued()  # waiting requests need not wait here

    registration: Registration[Engine] = Registration(on_change)
    role = _role(directory, name, section, registration, inbox)
    publisher, watched = engine_publisher(context.runtime, name, registration)
    services: Services = {
        (name, CheckGrammar): Function(accept_grammar),
        **watched,
        **operations.engine_services(name, registration, life),
        (name, SetRole): Function(partial(set_role, context, name, role, life)),
        # The kind's own come last, since a kind's checker of grammars replaces the one that accepts all.
        **of_kind(name, kind),
    }
    workers = [
        LocalWorker(
            node=context.node,
            directory=directory,
            idle_offer=offer,
            address=address,
            engine=registration,
            inbox=inbox,
            services=under_name(name, services),
            ranks=ranks,
            weights=lambda: FIRST_WEIGHTS if life.live is None else life.live.weights,
        )
        for offer in offers_of(name, section)
    ]
    directory.local.update((worker.name, worker) for worker in workers)
    local = LocalEngine(
        name=name,
        configured=section,
        registration=registration,
        inbox=inbox,
        on_up=directory.reroute_queued,
        on_down=workers[0].reroute_queued,  # all workers have one inbox
        text=text,
        digest=directory.models.digests.get(section.model, ()),
        slots=slots,
        life=life,
        newest=directory.newest_weights(section.model),
        on_begun=tuple(worker.computed for worker in workers),
        shares_prefixes=_shares_prefixes(context, evolve(section, leg="both")),
        role=role,
    )
    tree = worker(context, local, kind.engine(local))
    return _EngineParts(local=local, tree=tree, services=services, publisher=publisher)


def _role(
    directory: Directory, name: str, section: EngineSection, registration: Registration[Engine], inbox: RequestInbox
) -> EngineRole:
    """Return the role of an engine; when it changes, workers offer the new one, and what waits is asked elsewhere."""

    def on_change() -> None:
        for offer in offers_of(name, role.section):
            directory.local[offer.name].idle_offer = offer
        registration.failure = None  # the end of the last life was none
        inbox.turn_away(NotReady(f"engine {name} starts as {role.leg}"))
        directory.notify()

    role = EngineRole(section, on_change)
    return role


def _shares_prefixes(context: NodeContext, section: EngineSection) -> bool:
    """Whether prompts with one beginning wait for each other: routers follow the engine's prefix cache."""
    by_prefix = context.cluster.model[section.model].follows_blocks
    return by_prefix and section.has_prefix_cache and section.publishes(context.cluster)


def _encoder(context: NodeContext, name: str, text: TextModel | None, kind: KindChildren) -> _EngineParts:
    assert kind.encoder is not None  # the configuration has been checked
    directory, section = context.directory, context.cluster.engine[name]
    registration: Registration[Encoder] = Registration(directory.notify)
    cache = EmbeddingCache(section.encoder.cache_bytes_max)
    address, inbox = encode_inbox(context.cluster.model[section.model].queue_max)
    services = {**operations.encoder_services(name, registration, cache), **of_kind(name, kind)}
    (offer,) = offers_of(name, section)
    local_worker = LocalWorker(
        node=context.node,
        directory=directory,
        idle_offer=offer,
        address=address,
        engine=registration,
        inbox=inbox,
        services=under_name(name, services),
    )
    directory.local[name] = local_worker
    local = LocalEncoder(
        name=name,
        configured=section,
        registration=registration,
        inbox=inbox,
        on_up=directory.reroute_queued,
        on_down=local_worker.reroute_queued,
        text=text,
        digest=directory.models.digests.get(section.model, ()),
    )
    tree = _encoder_worker(context, local, cache, kind.encoder(local))
    return _EngineParts(local=local, tree=tree, services=services, embeddings=cache)


def _embedder(context: NodeContext, name: str, text: TextModel | None, kind: KindChildren) -> _EngineParts:
    assert kind.embedder is not None  # the configuration has been checked
    directory, section = context.directory, context.cluster.engine[name]
    registration: Registration[Embedder] = Registration(directory.notify)
    address, inbox = embed_inbox(context.cluster.model[section.model].queue_max)
    services = {**operations.embedder_services(name, registration), **of_kind(name, kind)}
    (offer,) = offers_of(name, section)
    local_worker = LocalWorker(
        node=context.node,
        directory=directory,
        idle_offer=offer,
        address=address,
        engine=registration,
        inbox=inbox,
        services=under_name(name, services),
    )
    directory.local[name] = local_worker
    local = LocalEmbedder(
        name=name,
        configured=section,
        registration=registration,
        inbox=inbox,
        on_up=directory.reroute_queued,
        on_down=local_worker.reroute_queued,
        text=text,
        digest=directory.models.digests.get(section.model, ()),
    )
    return _EngineParts(local=local, tree=_embedder_worker(context, local, kind.embedder(local)), services=services)


def worker(context: NodeContext, local: LocalEngine, engine: EngineChild) -> Tree:
    """Return an engine, the actor that gives it requests, and a canary for each of its ranks."""
    section, names = local.section, [offer.name for offer in offers_of(local.name, local.section)]
    pending_max = section.pending_prefill_max
    observers = [
        SlotMetrics(context.runtime.metrics, f"{section.node}/{name}", context.runtime.spans, on_begun)
        for name, on_begun in zip(names, local.on_begun, strict=True)
    ]
    life = evolve(engine.child, run=local.role.run_life, args=(partial(engine.child.run, *engine.child.args),))
    return _tree(
        local,
        evolve(engine, child=life),
        Child(
            name="prefill" if section.leg == "prefill" else "decode",
            run=run_requests,
            args=(local, observers, engine.reach),
            stop_within_s=RELEASE_S + 1.0,
            about=f"one slot a {'prompt' if section.leg == 'prefill' else 'request'}{_of_ranks(section)}",
            limits=(
                *((("ranks", section.data_parallel),) if section.data_parallel > 1 else ()),
                *((key.replace("_", " "), value) for key, value in asdict(section.deadlines).items()),
                *((("pending prefill tokens", pending_max),) if pending_max else ()),
                *((("KV tokens admitted", section.kv_tokens_max),) if section.admits_by_memory else ()),
            ),
        ),
        *(_canary(context, local, rank) for rank in range(section.data_parallel) if section.canary.enabled),
    )


def _of_ranks(section: EngineSection) -> str:
    return ", of each rank" if section.data_parallel > 1 else ""


def _canary(context: NodeContext, local: LocalEngine, rank: int) -> Child:
    """Return the child that watches a rank of an engine while it is idle."""
    section, runtime, limits = local.section, context.runtime, local.section.canary_limits
    observer = CanaryMetrics(runtime.metrics, f"{section.node}/{local.name}")
    has_one = section.data_parallel == 1
    return Child(
        name="canary" if has_one else f"canary-{rank}",
        run=run_canary,
        args=(local, rank, runtime.new_id, runtime.new_number, KINDS[section.kind].hand_off, observer),
        stop_within_s=RELEASE_S + 1.0,
        about=f"asks {'the idle engine' if has_one else f'rank {rank}, while idle,'} for a token",
        limits=(("after s", limits.after_s), ("within s", limits.answered_within_s)),
    )


def _encoder_worker(context: NodeContext, local: LocalEncoder, cache: EmbeddingCache, engine: EngineChild) -> Tree:
    """Return an encoder and the actor that gives it batches."""
    section = local.section
    return _tree(
        local,
        engine,
        Child(
            name="encoder",
            run=run_encoder,
            args=(
                local,
                cache,
                EncoderMetrics(context.runtime.metrics, f"{section.node}/{local.name}", context.runtime.spans),
            ),
            stop_within_s=EncoderLimits().release_s + 1.0,
            about="images and videos in batches",
            limits=tuple((key.replace("_", " "), value) for key, value in asdict(section.encoder).items()),
        ),
    )


def _embedder_worker(context: NodeContext, local: LocalEmbedder, engine: EngineChild) -> Tree:
    """Return an embedder and the actor that gives it requests."""
    section = local.section
    return _tree(
        local,
        engine,
        Child(
            name="embedder",
            run=run_embedder,
            args=(
                local,
                EmbedderMetrics(context.runtime.metrics, f"{section.node}/{local.name}", context.runtime.spans),
            ),
            stop_within_s=RELEASE_S + 1.0,
            about="one slot a part of a request",
            limits=(("computing s", section.deadlines.total_s),),
        ),
    )


def _tree(local: LocalEngine | LocalEncoder | LocalEmbedder, engine: EngineChild, *actors: Child) -> Tree:
    return Tree(
        name=local.name,
        strategy=Strategy.ONE_FOR_ALL,
        # It fails without its siblings, and is tried again for ever, at most every half minute.
        restarts_max=None,
        backoff=Backoff(min_s=engine.retry_min_s, crashes=True),
        needs=engine.needs,
        about=f"{local.section.model} {engine.about}",
        children=(engine.child, *actors),
    )
