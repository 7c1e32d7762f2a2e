"""From a cluster's description to one node's tree: which children there are, and what is plugged into what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, cast

import trio
from attrs import asdict, define, evolve, field

from actors.engines.port import Engine
from actors.engines.sglang import model_files
from actors.kit.calls import Address, Askable, Call, mailbox
from actors.processor import TextReply, TextRequest, TextResult, processor
from actors.routing.policies import POLICIES
from actors.routing.routing import Routing
from actors.text.model import TextModel, load
from actors.text.prompts import PromptLimits
from protocol.errors import StartFailed
from protocol.greeting import Incarnation
from protocol.kind import Message
from protocol.messages import Generate
from protocol.model_folder import FILES
from supervisor.cluster import engine_control, models, readiness
from supervisor.cluster.directory import Directory
from supervisor.cluster.mesh import Mesh
from supervisor.cluster.model_identity import ModelIdentities
from supervisor.cluster.workers import GuardedWorker
from supervisor.config.load import Cluster
from supervisor.control.control import NodeControl
from supervisor.engines import grammar_checks
from supervisor.engines.children import node_engines, offer
from supervisor.engines.kind import NodeContext, Retried
from supervisor.engines.work import work_queue
from supervisor.files import reading
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.origins import Origins
from supervisor.gateway.requests import RequestRunner, ServedModel
from supervisor.gateway.server import serve
from supervisor.links.serving import Services
from supervisor.links.websocket import Endpoint
from supervisor.node import gauges, monitoring, router_child
from supervisor.node.credentials import Credentials
from supervisor.observers import RoutingMetrics
from supervisor.runtime import Runtime
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.registration import Registration
from supervisor.supervision.status import TreeStatus
from supervisor.supervision.tree import Child, Tree
from supervisor.version import version

LINKS = "links"

AskedInbox: TypeAlias = trio.MemoryReceiveChannel[Call[TextRequest, TextReply, TextResult]]


@define(eq=False)
class Assembly:
    """One node's tree, and the handles that the node's own tasks need; only one node of a cluster has a door."""

    tree: Tree
    directory: Directory
    controls: NodeControl
    standing: TreeStatus
    live: Live
    engines: Mapping[str, Registration[Engine]]  # this node's own
    offered: Mapping[str, Retried]  # by the children that come and go
    door: Gateway | None = None
    links: Mesh | None = None
    monitoring: Gateway | None = None  # for probes and scrapers alone

    def watch(self, happening: ChildEvent) -> None:
        """Note what happens to the tree, for whoever asks how it is and why something is not there."""
        self.standing.on_event(happening)
        _, _, rest = happening.path.partition("/")
        plug = self.offered.get(rest.partition("/")[0])
        if happening.kind is ChildEventKind.RESTARTING and plug is not None:
            plug.note_failure(self.standing.last_error(happening.path), happening.wait_s)

    @property
    def start_failure(self) -> str | None:
        """Why no engine of this node could be started, once each has been tried, if it is here for nothing else."""
        serves_others = self.door is not None and self.links is not None
        failures = [plug.failure for plug in self.engines.values() if plug.last is None and plug.failure is not None]
        if serves_others or not failures or len(failures) < len(self.engines):
            return None
        return "; ".join(dict.fromkeys(failure.reason for failure in failures))


@define(eq=False)
class Live:
    """What a reload may change of the requests that are asked from then on."""

    prompt_tokens_max: int
    routings: dict[str, Routing] = field(factory=dict)  # of each model that is asked here


def assemble(cluster: Cluster, node: str, world: Runtime, credentials: Credentials) -> Assembly:
    """Return the house of one node; raises `StartFailed` if a model's files cannot be used."""
    directory = Directory(node, routes=cluster.gateway.node == node, required_peers=cluster.must_meet(node))
    with_door, registry = cluster.gateway.node == node, world.metrics.registry
    texts = _texts(cluster, node, world.strftime, every=with_door)
    directory.models = ModelIdentities({name: text.digest for name, text in texts.items()})
    front: list[Child | Tree] = []
    computing = node_engines(NodeContext(cluster, node, world, directory), texts)
    children: list[Child | Tree] = [*computing.children]
    engines = computing.engines
    controls = NodeControl(directory, world.new_id(), version(), partial(engine_control.local_loads, engines))
    live = Live(cluster.gateway.prompt_tokens_max)
    serves = {**computing.served, **engine_control.engine_services(engines), **controls.serves}
    directory.attach_services(serves)
    links = _links(cluster, node, directory, world, serves, credentials)
    if links is not None:
        links.incarnation = Incarnation(controls.run, int(world.now()))
        gauges.add_link_metrics(registry, directory, links.traffic)
    gauges.add_node_gauges(registry, directory)
    up = readiness.engines_up if with_door else gauges.local_engines_up
    gauges.add_engine_up(registry, partial(up, directory))
    door = None
    if with_door:
        served: dict[str, ServedModel] = {}
        for name in cluster.model:
            children += _asked_of(cluster, name, texts[name], directory, world, served, live, computing.served)
        controls.aside = partial(router_child.ejected, live.routings)
        router_child.add_ejected_gauge(registry, live.routings)
        door = _door(cluster, served, directory, world, live, credentials)
        front.append(_gateway(cluster, door))
    about = f"node on {cluster.node[node].host}, drains for {cluster.node[node].drain_s:g} s"
    scraped = _scraped(cluster, node, directory, door, world, credentials, front)
    if links is not None:
        front.append(_linking(links))
    tree = Tree(name=node, children=_in_order(front, children), restarts_max=5, restarts_window_s=300.0, about=about)
    standing = controls.standing = TreeStatus(tree)
    return Assembly(tree, directory, controls, standing, live, engines, computing.published, door, links, scraped)


def _in_order(front: Sequence[Child | Tree], others: Sequence[Child | Tree]) -> tuple[Child | Tree, ...]:
    """Return children that need no more than they must, so that they start and stop together.

    The gateway comes first and goes last: it says why nobody is served yet, and how the last ones ended. So do the
    probes, and then the links, by which others hear of the same.
    """
    placed: list[Child | Tree] = []
    for child in front:
        placed.append(evolve(child, needs=tuple(each.name for each in placed) if child.name == LINKS else ()))
    names = tuple(child.name for child in placed)
    return (*placed, *(evolve(child, needs=(*names, *(child.needs or ()))) for child in others))


def _asked(size: int) -> tuple[Address[TextRequest, TextReply, TextResult], AskedInbox]:
    return mailbox(size)


def _asked_of(
    cluster: Cluster,
    name: str,
    text: TextModel,
    directory: Directory,
    world: Runtime,
    served: dict[str, ServedModel],
    live: Live,
    checks: Services,
) -> tuple[Child, Child]:
    """Return the router and the processor of a model, and note where the model is asked."""
    section, gateway = cluster.model[name], cluster.gateway
    work, work_inbox = work_queue(section.queue_max)
    asked, asked_inbox = _asked(gateway.requests_max)
    plain = name.replace("/", ":")
    routing = live.routings[name] = Routing(
        pool=directory.pool(name),
        policy=POLICIES[section.policy],
        limits=router_child.limits(section),
        new_room=world.new_room,
        new_id=world.new_id,
        prefill_tokens_min=section.prefill_tokens_min,
        ends=text.eos_token_ids,
        watch=RoutingMetrics(world.metrics, name),
        ranked=partial(directory.ranked, name),
    )
    child = router_child.child(name, section, work_inbox, routing)
    served[name] = ServedModel(
        partial(models.model_object, name, directory, int(world.now())),
        asked,
        partial(models.request_tokens_max, directory, name),
    )
    return child, Child(
        name=f"processor-{plain}",
        run=processor,
        args=(
            *(asked_inbox, text, work, partial(_limits, directory, name, live)),
            world.aside,
            gateway.requests_max,
            gateway.text.tokenize_tokens_max,
            partial(grammar_checks.check, directory, checks, world.aside, name),
        ),
        about=f"conversations to tokens and back, for {name}",
        limits=(("requests", gateway.requests_max),),
    )


def _limits(directory: Directory, model: str, live: Live) -> PromptLimits | None:
    return models.request_limits(directory, model, live.prompt_tokens_max)


# Links ---------------------------------------------------------------------------------


def _links(
    cluster: Cluster, node: str, directory: Directory, world: Runtime, more: Services, credentials: Credentials
) -> Mesh | None:
    """Return what keeps this node in touch with the others, None if it is and stays alone."""
    section = cluster.node[node]
    for name in (other for other in cluster.node if other != node):
        offers = [offer(key, each) for key, each in cluster.engines_on(name).items()]
        directory.configure(name, cluster.node[name].dial_address, offers)
    join = tuple(map(Endpoint.read, cluster.cluster.join))
    if section.listen is None and len(cluster.node) == 1 and not join:
        return None
    serves: dict[tuple[str, type[Message]], Askable[Message, Message, Message]] = {
        (name, Generate): cast("Askable[Message, Message, Message]", GuardedWorker(worker))
        for name, worker in directory.local.items()
    }
    serves.update(more)
    return Mesh(
        name=node,
        section=cluster.cluster,
        directory=directory,
        serves=serves,
        listen=None if section.listen is None else Endpoint.read(section.listen),
        host=section.host,
        secret=credentials.secret,
        tls=credentials.tls,
        new_nonce=world.new_nonce,
        chance=world.chance(0),
        reserve=world.reserve,
        join=join,
    )


def _linking(links: Mesh) -> Child:
    section = links.section
    return Child(
        name=LINKS,
        run=links.run,
        stop_within_s=2.0,
        about=f"other nodes at {links.listen}" if links.listen else "dials the other nodes",
        limits=(
            ("streams of a node", section.streams_max),
            *((f"{key} s", getattr(section, f"{key}_s")) for key in ("heartbeat", "silent", "handshake")),
            ("greets", section.handshakes_max),
            ("tells a second", section.announcements_max),
        ),
    )


# Children ------------------------------------------------------------------------------


def _gateway(cluster: Cluster, door: Gateway) -> Child:
    section = cluster.gateway
    return Child(
        name="gateway",
        run=serve,
        args=(door, ROUTES, section.host, section.port),
        stop_within_s=section.limits.close_s + 1.0,
        about=f"clients at http{'s' * bool(section.tls_certificate)}://{section.host}:{section.port}",
        limits=(
            ("requests", section.requests_max),
            ("prompt tokens", section.prompt_tokens_max),
            ("waiting", section.waiting_max),
            ("admit s", section.admit_s),
            ("first token s", section.first_token_s),
            ("total s", section.total_s),
            *((f"text {key.replace('_', ' ')}", value) for key, value in asdict(section.text).items()),
            *((key.replace("_", " "), value) for key, value in asdict(section.limits).items()),
        ),
    )


def _door(
    cluster: Cluster,
    served: Mapping[str, ServedModel],
    directory: Directory,
    world: Runtime,
    live: Live,
    credentials: Credentials,
) -> Gateway:
    assert credentials.keys is not None  # they are read on the node of the gateway
    section, names = cluster.gateway, tuple(cluster.model)
    never_ready = partial(readiness.never_ready, directory, names)
    gate = AdmissionGate(section.requests_max, section.admit_s, section.waiting_max, never_ready)
    opened = Gateway(
        runner=RequestRunner(served, world.metrics, section.first_token_s, section.total_s),
        gate=gate,
        limits=section.limits,
        keys=credentials.keys,
        certificate=credentials.certificate,
        tls=credentials.client_tls,
        reserve=world.reserve,
        aside=world.aside,
        origins=Origins(frozenset(section.allowed_hosts), frozenset(section.allowed_origins)),
        grammars=frozenset(section.grammars),
        unready=partial(readiness.unready, directory, names),
        metrics_text=partial(monitoring.cluster_metrics_text, directory, world.metrics),
        new_id=world.new_id,
        now=world.now,
        server_info=partial(
            models.server_info, cluster, directory, version(), partial(router_child.ejected, live.routings)
        ),
        flush_cache=partial(engine_control.flush_caches, directory),
    )
    gauges.add_gateway_gauges(world.metrics.registry, opened)
    return opened


def _scraped(
    cluster: Cluster,
    node: str,
    directory: Directory,
    door: Gateway | None,
    world: Runtime,
    credentials: Credentials,
    front: list[Child | Tree],
) -> Gateway | None:
    """Return where probes and scrapers ask, None if the file names no place for it, adding what keeps it."""
    if (listen := cluster.node[node].metrics) is None:
        return None
    at = Endpoint.read(listen)
    unready: Callable[[], str | None]
    if door is None:
        own = {here.load.name: here.engine for here in directory.local.values()}
        unready = partial(monitoring.unready, cluster, directory)
        text: Callable[[], Awaitable[bytes]] = partial(monitoring.local_metrics_text, own, world.metrics)
    else:
        unready, text = door.unready, door.metrics_text
    opened = monitoring.door(at, world, credentials.monitoring_keys, unready, text)
    front.append(monitoring.child(at, opened))
    return opened


# Files ---------------------------------------------------------------------------------


def _texts(cluster: Cluster, node: str, strftime: Callable[[str], str], *, every: bool) -> dict[str, TextModel]:
    """Return what is needed to read and write each model's text here: where it is asked, or an engine reads it."""
    read = {each.model for each in cluster.engines_on(node).values() if each.reads_text}
    return {name: _text(cluster, name, strftime) for name in cluster.model if every or name in read}


def _text(cluster: Cluster, name: str, strftime: Callable[[str], str]) -> TextModel:
    section, folder = cluster.model[name], cluster.model_path(name)
    try:
        own = {file: (folder / file).read_bytes() for file in FILES if (folder / file).is_file()}
        template = None if section.template is None else reading.template(cluster.folder / section.template)
        return evolve(load(own, template, strftime=strftime), digest=model_files.model_digest(folder))
    except (StartFailed, OSError, UnicodeDecodeError) as error:
        raise StartFailed(f"model {name} in {folder}: {error}") from error
