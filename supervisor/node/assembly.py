"""The assembly of a node: its tree, and everything that its children share, made from the cluster's configuration.

Nothing runs here. What children share (registrations, inboxes, the directory) is made first and outlives their
restarts; then the children are made, and `assemble` lists them in the order of their starts. That list is the node's
first policy, so it stands in one expression: helpers return children, and nothing is inserted afterwards.

Each object is complete when it is made. So the construction follows the order of the dependencies, and a value that
comes and goes while the node runs is passed as a registration: an engine, or to the control service the node itself.

The gateway starts first and stops last: it reports why no request is served yet, and answers the last ones. So does
the monitoring endpoint. Then come the links, by which other nodes learn the same. Engines follow, and last the
actors that use them. Children of one kind do not need each other, so they start and stop concurrently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from attrs import evolve, frozen

from actors.engines.port import Engine
from actors.text.embedding_model import EmbeddingModel
from actors.text.model import TextModel
from protocol.model_folder import Digest
from supervisor.cluster import engine_control, readiness
from supervisor.cluster.directory import Directory
from supervisor.cluster.mesh import Mesh
from supervisor.cluster.model_identity import ModelIdentities
from supervisor.cluster.model_weights import keep_weights
from supervisor.config.schema import Cluster
from supervisor.control.control import NodeControl
from supervisor.engines.children import NodeEngines, node_engines
from supervisor.engines.kind import NodeContext, RetriedChild
from supervisor.engines.kinds import hand_off_refusal
from supervisor.gateway.gateway import Gateway
from supervisor.node import gauges, router_child
from supervisor.node.credentials import Credentials
from supervisor.node.embedding_children import EmbeddingsOfModel, embedding_models
from supervisor.node.gateway_children import gateway_child, make_gateway
from supervisor.node.link_children import make_mesh, mesh_child
from supervisor.node.media_child import MediaChildren, media_children
from supervisor.node.model_children import RoutedModel, pool_view, routed_models
from supervisor.node.monitoring import make_monitoring, monitoring_child
from supervisor.node.pools import PoolView
from supervisor.node.text_models import load_embedding_models, load_text_models
from supervisor.runtime import Runtime
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.registration import Registration
from supervisor.supervision.status import NO_FAILURES, EarlierFailures, TreeStatus
from supervisor.supervision.tree import Child, Tree
from supervisor.version import version

RESTARTS_MAX, RESTARTS_WINDOW_S = 5, 300.0
ENGINE_CHILD = "/engine"  # the end of the path of an engine among its siblings
SALT_BYTES = 8  # of what a client would have to guess to deceive the check of its conversation
Children = tuple[Child | Tree, ...]


@frozen(eq=False, kw_only=True)
class Assembly:
    """The tree of a node, and the objects that its own tasks use; one node of a cluster has the gateway."""

    tree: Tree
    directory: Directory
    controls: NodeControl
    status: TreeStatus
    models: Mapping[str, RoutedModel]  # of answers, by name, on a node with a gateway
    node_engines: NodeEngines
    published: Mapping[str, RetriedChild]  # by the name of the child that publishes it
    gateway: Gateway | None
    links: Mesh | None
    monitoring: Gateway | None  # the endpoint for probes and scrapers

    @property
    def engines(self) -> Mapping[str, Registration[Engine]]:
        """The engines of this node that compute tokens."""
        return self.node_engines.engines

    def on_event(self, event: ChildEvent) -> None:
        """Apply an event to the status of the tree, and to the registration of the child that is restarted."""
        self.status.on_event(event)
        _, _, below = event.path.partition("/")
        registration = self.published.get(below.partition("/")[0])
        if registration is None:
            return
        if event.kind is ChildEventKind.RESTARTING:
            registration.note_failure(self.status.last_error(event.path), event.wait_s)
        elif event.kind is ChildEventKind.FAILED and below.endswith(ENGINE_CHILD):
            # Its siblings may fail a moment before it, with no more than that it is lost.
            registration.explain_failure(self.status.last_error(event.path))

    @property
    def start_failure(self) -> str | None:
        """The reason why no engine of this node could start, once each has tried; None if the node has other uses."""
        serves_others = self.gateway is not None and self.links is not None
        every = self.node_engines.every
        never_up = (registration for registration in every.values() if registration.last is None)
        failures = [registration.failure for registration in never_up if registration.failure is not None]
        if serves_others or not failures or len(failures) < len(every):
            return None
        return "; ".join(dict.fromkeys(failure.reason for failure in failures))


def assemble(
    cluster: Cluster,
    node: str,
    runtime: Runtime,
    credentials: Credentials,
    earlier: EarlierFailures = NO_FAILURES,  # of processes of the node, as its launcher knows them
) -> Assembly:
    """Return the assembly of a node; raises `StartFailed` if a model's files cannot be used."""
    has_gateway = node in cluster.gateway_nodes
    texts = load_text_models(cluster, node, runtime.strftime, str(int.from_bytes(runtime.new_nonce()[:SALT_BYTES])))
    embedding_texts = load_embedding_models(cluster, node)
    identities = ModelIdentities(digests({**texts, **embedding_texts}), hand_off_refusal)
    directory = Directory(node, routes=has_gateway, required_peers=cluster.required_peers(node), models=identities)
    context = NodeContext(cluster, node, runtime, directory)
    engines = node_engines(context, texts)
    media = media_children(context, texts) if has_gateway else MediaChildren()
    models = routed_models(context, texts, media, credentials) if has_gateway else {}
    embeddings = embedding_models(context, embedding_texts) if has_gateway else {}
    pools = pool_view(context, models)
    ejections = partial(router_child.ejected, {name: model.routing for name, model in models.items()})
    controls = NodeControl(
        directory=directory,
        run=runtime.new_id(),
        version=version(),
        loads=partial(engine_control.local_loads, engines.every),
        ejections=ejections,
        pools=pools.states,
    )
    services = {**engines.served, **controls.services}
    links = make_mesh(cluster, directory, runtime, services, credentials, controls.run)
    served = {name: model.served for each in (models, embeddings) for name, model in each.items()}
    gateway = make_gateway(context, served, pools, ejections, credentials) if has_gateway else None
    monitor = make_monitoring(cluster, directory, gateway, runtime, credentials)
    add_gauges(context, engines, models, media, pools, gateway, links)
    tree = _tree(
        context,
        in_order(
            gateway=() if gateway is None else (gateway_child(cluster, gateway),),
            monitoring=() if monitor is None else (monitoring_child(cluster.node[node].metrics, monitor),),
            links=() if links is None else (mesh_child(links),),
            others=(
                *engines.children,
                *media.children,
                *model_children(models, embeddings, directory),
            ),
        ),
    )
    return Assembly(
        tree=tree,
        directory=directory,
        controls=controls,
        status=TreeStatus(tree, earlier),
        models=models,
        node_engines=engines,
        published={**engines.published, **media.published},
        gateway=gateway,
        links=links,
        monitoring=monitor,
    )


def digests(texts: Mapping[str, TextModel | EmbeddingModel]) -> dict[str, Digest]:
    """Return the digest of each model's folder, by name."""
    return {name: text.digest for name, text in texts.items()}


def _tree(context: NodeContext, children: Children) -> Tree:
    section = context.cluster.node[context.node]
    return Tree(
        name=context.node,
        children=children,
        restarts_max=RESTARTS_MAX,
        restarts_window_s=RESTARTS_WINDOW_S,
        about=f"node on {section.host}, drains for {section.drain_s:g} s",
    )


def model_children(
    models: Mapping[str, RoutedModel], embeddings: Mapping[str, EmbeddingsOfModel], directory: Directory
) -> Children:
    """Return the children of all models, and the child that keeps the weights of each at one version."""
    if not models and not embeddings:
        return ()
    about = "brings engines that are behind to the newest weights of their model"
    weights = Child(name="weights", run=keep_weights, args=(directory,), about=about)
    return (
        *(child for model in models.values() for child in model.children),
        *(model.child for model in embeddings.values()),
        weights,
    )


def add_gauges(
    context: NodeContext,
    engines: NodeEngines,
    models: Mapping[str, RoutedModel],
    media: MediaChildren,
    pools: PoolView,
    gateway: Gateway | None,
    links: Mesh | None,
) -> None:
    """Define the gauges of a node, in its runtime's registry."""
    registry, directory = context.runtime.metrics.registry, context.directory
    if gateway is not None:
        gauges.add_pool_gauges(registry, pools)
        gauges.add_gateway_gauges(registry, gateway)
        gauges.add_media_gauges(registry, media)
        gauges.add_prompt_cache_metrics(registry, {name: model.prompt_cache for name, model in models.items()})
        router_child.add_ejected_gauge(registry, {name: model.routing for name, model in models.items()})
        router_child.add_feed_gauges(
            registry, {name: model.feed for name, model in models.items() if model.feed is not None}
        )
    if links is not None:
        gauges.add_link_metrics(registry, directory, links.traffic)
    gauges.add_node_gauges(registry, directory)
    gauges.add_shared_memory_gauges(registry, context.shared)
    gauges.add_encoder_gauges(registry, context.node, engines.embeddings)
    up = readiness.engines_up if gateway is not None else gauges.local_engines_up
    gauges.add_engine_up(registry, partial(up, directory))


def in_order(*, gateway: Children, monitoring: Children, links: Children, others: Children) -> Children:
    """Return the children of a node in the order of their starts, with the children that each needs."""
    return (
        *_needing((), (*gateway, *monitoring)),
        *_needing((*gateway, *monitoring), links),
        *_needing((*gateway, *monitoring, *links), others),
    )


def _needing(needed: Sequence[Child | Tree], children: Children) -> Children:
    """Return `children`, each with all of `needed` added to its needs.

    A child with `needs=None` names none: in the tree that is run it needs `needed`, and not all earlier siblings.
    """
    names = tuple(member.name for member in needed)
    return tuple(evolve(child, needs=(*names, *(child.needs or ()))) for child in children)
