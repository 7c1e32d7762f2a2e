"""Validation of `cluster.toml` across keys: contradictions between individually valid values.

Each function yields mistakes and raises nothing, so that one mistake hides no other: an operator gets them all at once.
`structure` has checked the types of the values. Nothing here opens a file or a socket; of the disk only the existence
of files is checked. `supervisor/node/reload/file_checks.py` checks the contents of files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from math import inf
from pathlib import Path

import attrs
from attrs import asdict

from actors.engines.encoding.limits import BatchLimits
from actors.routing.policies.table import POLICIES
from protocol.messages.cluster import OFFERS_MAX, OPERATOR_PREFIX, Leg
from protocol.strict.mistakes import Mistake, describe, join, segment
from supervisor.config import gateway_nodes, media
from supervisor.config.checks import listener_checks, pairing_checks, pool_checks, task_checks, time_checks
from supervisor.config.limits import WILDCARD
from supervisor.config.schema import Cluster, EngineSection, Kinds
from supervisor.config.sections import WILDCARD_HOSTS, ClusterSection

TREE_NAMES = ("gateway", "links", "media", "metrics", "publishers", "weights")
TREE_PREFIXES = (
    "processor-",
    "router-",
    "embeddings-",
    *(f"{row.feed_name}-" for row in POLICIES.values() if row.feed_name),
)
TOKEN_KEYS = (
    *(
        "data_parallel",
        "admission",
        "kv_tokens_max",
        "context_max",
        "page_size",
        "prefill_chunk",
        "pending_prefill_tokens_max",
        "deadlines",
        "canary",
    ),
)
HEARTBEAT_S_MIN = 0.01
HUB = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")  # a model's name where models are published
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@\\]+")


def is_host(text: str) -> bool:
    """Whether a text is a host name, or an IP address without brackets and port."""
    try:
        return HOST.fullmatch(text) is not None or bool(ip_address(text.partition("%")[0]))
    except ValueError:
        return False


def cross_check(cluster: Cluster, kinds: Kinds) -> Iterator[Mistake]:
    """Yield every mistake; `kinds` has all kinds of engines."""
    yield from gateway_nodes.mistakes(cluster)
    served = {engine.model for engine in cluster.engine.values()}
    spellings = Counter(name.replace("/", ":") for name in cluster.model)
    for name, model in cluster.model.items():
        path = join("model", segment(name))
        if name not in served and served <= cluster.model.keys():  # else a misspelled model may be meant for it
            yield Mistake(path, "no engine serves it")
        if spellings[name.replace("/", ":")] > 1:
            yield Mistake(path, "differs from another model's name by nothing but / and :")
        yield from _missing_folder(cluster, name, path)
        if model.template_name is not None and not isinstance(model.template, str) and model.template.name is not None:
            yield Mistake(f"{path}.template_name", "cannot stand beside template.name, which means the same")
        if (file := model.chat_template.file) is not None:
            yield from _missing_file(cluster, file, f"{path}.{model.template_file_key}")
    yield from _node_mistakes(cluster)
    yield from listener_checks.collisions(gateway_nodes.expand(cluster))
    yield from time_checks.mistakes(cluster)
    yield from _gateway_mistakes(cluster)
    yield from media.mistakes(cluster.gateway.media, cluster.folder)
    yield from pool_checks.mistakes(cluster)
    yield from pairing_checks.mistakes(cluster)
    yield from task_checks.mistakes(cluster)
    legs = {(engine.model, engine.worker_leg.value) for engine in cluster.engine.values()}
    for name, engine in cluster.engine.items():
        path = join("engine", segment(name))
        if _is_reserved(name, kinds):
            yield Mistake(path, "is the name of another part of the tree")
        yield from engine_mistakes(cluster, engine, path)
        yield from _leg_mistakes(cluster, engine, path, legs)


def _is_reserved(name: str, kinds: Kinds) -> bool:
    """Whether another child of a node's tree has, or may have, the name of an engine."""
    in_every_tree = name in TREE_NAMES or name.startswith(TREE_PREFIXES)
    return in_every_tree or any(section.reserves(name) for section in kinds.values())


def _missing_folder(cluster: Cluster, name: str, path: str) -> Iterator[Mistake]:
    try:
        folder = cluster.model_path(name)
        if not folder.is_dir():
            yield Mistake(f"{path}.path", _no_model(cluster.model[name].path, folder))
    except (OSError, RuntimeError) as error:  # a user that does not exist, a link to itself
        yield Mistake(f"{path}.path", f"is no folder: {error}")


def _no_model(written: str, folder: Path) -> str:
    """Return why there is no folder of a model at a path, and what to do about it."""
    if folder.is_file():
        served = "; GGUF files are not served, only safetensors" if folder.suffix == ".gguf" else ""
        return f"{folder} is a file: name the folder with config.json, tokenizer.json and the weights{served}"
    published = HUB.fullmatch(written) is not None and not folder.parent.exists()
    fetch = f"; nothing is downloaded: `hf download {written} --local-dir {folder}`" if published else ""
    return f"there is no folder {folder}{fetch}"


def _missing_file(cluster: Cluster, name: str, path: str) -> Iterator[Mistake]:
    file = cluster.folder / name
    try:
        if not file.exists():
            yield Mistake(path, f"there is no file {file}")
        elif not file.is_file():
            yield Mistake(path, f"{file} is a {'folder' if file.is_dir() else 'device'}, not a file")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        yield Mistake(path, f"is no file: {error.strerror}: {file}")


def _no_folder(path: str, key: str) -> Iterator[Mistake]:
    """Yield a mistake for an existing path that is no folder."""
    try:
        if Path(path).exists() and not Path(path).is_dir():
            yield Mistake(key, f"{path} is no folder")
    except OSError as error:
        yield Mistake(key, f"is no folder: {error.strerror}: {path}")


def _gateway_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    gateway = cluster.gateway
    for index, name in enumerate(gateway.allowed_hosts):
        if name != WILDCARD and not is_host(name):
            yield Mistake(
                f"gateway.allowed_hosts[{index}]", f"must be a host without scheme or port, got {describe(name)}"
            )
    if gateway.host and not is_host(gateway.host):
        yield Mistake("gateway.host", f"must be a host or an address without brackets, got {describe(gateway.host)}")
    if gateway.host in WILDCARD_HOSTS and not gateway.allowed_hosts:
        every = f"{gateway.host or 'an empty host'} is every address"
        yield Mistake("gateway.allowed_hosts", f"is missing: {every}, so say what clients call this server")
    for key in ("keys", "tls_certificate", "tls_key"):
        if (file := getattr(gateway, key)) is not None:
            yield from _missing_file(cluster, file, f"gateway.{key}")
    if (gateway.tls_certificate is None) != (gateway.tls_key is None):
        one, other = ("tls_certificate", "tls_key")[:: 1 if gateway.tls_key is None else -1]
        yield Mistake(f"gateway.{one}", f"means nothing without {other}")
    for index, origin in enumerate(gateway.allowed_origins):
        if origin != WILDCARD and not ORIGIN.fullmatch(origin.lower()):
            yield Mistake(
                f"gateway.allowed_origins[{index}]",
                f"must be like https://app.example, without a path; got {describe(origin)}",
            )


def engine_mistakes(cluster: Cluster, engine: EngineSection, path: str) -> Iterator[Mistake]:
    """Yield the mistakes in the section of an engine at `path`, but for a leg that can meet no other."""
    if engine.model not in cluster.model:
        yield Mistake(f"{path}.model", f"there is no model {engine.model}; there is {', '.join(cluster.model)}")
    if engine.node not in cluster.node:
        yield Mistake(f"{path}.node", f"there is no node {engine.node}; there is {', '.join(cluster.node)}")
    if engine.worker_leg is Leg.ENCODE:
        yield from _encoder_mistakes(engine, path)
    elif engine.worker_leg is Leg.EMBED:
        yield from _memory_mistakes(engine, path)
        yield from task_checks.embedder_mistakes(engine, path)
    else:
        yield from _memory_mistakes(engine, path)
        yield from _leg_key_mistakes(engine, path)
    for key, value in asdict(engine.deadlines).items():
        if not 0 < value < inf:
            yield Mistake(f"{path}.deadlines.{key}", f"must be above 0 and finite, got {value}")
    yield from engine.mistakes(cluster, path)


def _memory_mistakes(engine: EngineSection, path: str) -> Iterator[Mistake]:
    """Yield the mistakes in the KV memory of an engine for tokens."""
    if not engine.kv_tokens_max:
        yield Mistake(f"{path}.kv_tokens_max", "is missing")
    elif engine.kv_tokens_max < engine.pages_min * engine.page_size:
        words = {2: "two", 3: "three"}.get(engine.pages_min, engine.pages_min)
        yield Mistake(f"{path}.kv_tokens_max", f"is less than {words} pages of {engine.page_size} tokens")


def _leg_key_mistakes(engine: EngineSection, path: str) -> Iterator[Mistake]:
    """Yield the keys of an engine that answers that its leg does not have, and a context without room."""
    if engine.context_max == 1:
        yield Mistake(f"{path}.context_max", "leaves no room for a prompt and an answer")
    if engine.encoder != BatchLimits():
        yield Mistake(f"{path}.encoder", f"is for an encoder, and {path}.leg is {engine.leg}")
    if engine.leg == "decode" and engine.pending_prefill_tokens_max is not None:
        yield Mistake(f"{path}.pending_prefill_tokens_max", "is for engines that compute prompts")
    if engine.leg == "prefill" and engine.admission == "memory":
        why = "whose memory is free once a decode takes the cache, which may wait for memory, too"
        yield Mistake(f"{path}.admission", f"must not be memory for a prefill, {why}")


def _encoder_mistakes(engine: EngineSection, path: str) -> Iterator[Mistake]:
    """Yield the mistakes in the section of an encoder, which has no tokens and no KV memory."""
    if not engine.encodes:
        yield Mistake(f"{path}.leg", f"an engine of kind {engine.kind} cannot be an encoder")
    fields = attrs.fields_dict(type(engine))
    for key in TOKEN_KEYS:
        if getattr(engine, key) != fields[key].default:
            yield Mistake(f"{path}.{key}", f"is for engines that compute tokens, and {path}.leg is encode")
    if engine.encoder.batch_max > engine.slots:
        yield Mistake(f"{path}.encoder.batch_max", f"must be at most slots ({engine.slots})")


def _node_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the mistakes in `[node.NAME]`, and the nodes that cannot reach each other."""
    not_listening = [name for name, node in cluster.node.items() if node.listen is None]
    # Two pure gateways need no link, so one of them may lack an address beside another, but not beside any other node.
    pure_gateways = gateway_nodes.pure_gateways(cluster)
    first_other = next((name for name in not_listening if name not in pure_gateways), None)
    has_other = False
    for index, name in enumerate(not_listening):
        first = first_other if has_other and name in pure_gateways else not_listening[0]
        if index and (has_other or name not in pure_gateways):
            yield Mistake(f"node.{name}.listen", f"is missing: {first} does not listen either, so they cannot meet")
        has_other = has_other or name not in pure_gateways
    for name, node in cluster.node.items():
        if name.startswith(OPERATOR_PREFIX):
            yield Mistake(f"node.{name}", f"is an operator's name: no node's begins with {OPERATOR_PREFIX}")
        if not is_host(node.host):
            yield Mistake(f"node.{name}.host", f"must be a host or an address, got {describe(node.host)}")
        if node.logs is not None:
            yield from _no_folder(node.logs, f"node.{name}.logs")
    yield from _link_mistakes(cluster)
    yield from _offer_mistakes(cluster)


def _offer_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the nodes with more workers, one for each rank, than other nodes accept."""
    ranks = Counter[str]()
    for engine in cluster.engine.values():
        for node in engine.nodes:
            ranks[node] += engine.data_parallel
    for node, number in ranks.items():
        if number > OFFERS_MAX:
            why = f"its engines have {number} data-parallel ranks in all, and a node may have {OFFERS_MAX}"
            yield Mistake(join("node", segment(node)), why)


def _link_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the mistakes in `[cluster]`."""
    listening = {node.listen: name for name, node in cluster.node.items()}
    for index, address in enumerate(cluster.cluster.join):
        if not address.host:
            yield Mistake(f"cluster.join[{index}]", f"is {address}, and names no host that could be dialed")
        elif address in listening:
            yield Mistake(f"cluster.join[{index}]", f"is where node {listening[address]} of this file listens")
    section = cluster.cluster
    for key in ("secret", "tls_certificate", "tls_key", "tls_authority"):
        if (file := getattr(section, key)) is not None:
            yield from _missing_file(cluster, file, f"cluster.{key}")
    tls = [key for key in ("tls_certificate", "tls_key", "tls_authority") if getattr(section, key) is not None]
    if tls and len(tls) < 3:
        yield Mistake(f"cluster.{tls[0]}", "means nothing without tls_certificate, tls_key and tls_authority together")
    if section.verifies_node_names:
        yield from _certificate_name_mistakes(cluster)
    yield from _stream_mistakes(cluster)
    yield from _link_time_mistakes(section)


def _stream_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the nodes that need more streams: one for each slot, and one for the blocks of each engine."""
    slots, watched, gateways = Counter[str](), Counter[str](), {*cluster.gateway_nodes}
    for engine in cluster.engine.values():
        slots[engine.node] += engine.slots * engine.data_parallel
        by_prefix = engine.model in cluster.model and cluster.model[engine.model].follows_blocks
        # Whether or not it publishes.
        watched[engine.node] += by_prefix and engine.worker_leg in {Leg.BOTH, Leg.PREFILL}
    for name in cluster.node:
        needed = slots[name] + watched[name]
        if (len(gateways) > 1 or name not in gateways) and needed > cluster.cluster.streams_max:
            what = f"{slots[name]} slots to ask for"
            if watched[name]:
                what += f" and {watched[name]} of its engines to watch"
            yield Mistake("cluster.streams_max", f"is {cluster.cluster.streams_max}, and node {name} has {what}")


def _certificate_name_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the nodes that certificates cannot identify, if they must name nodes."""
    if cluster.cluster.tls_certificate is None:
        yield Mistake("cluster.tls_names", 'means nothing without tls_certificate: "nodes" are named by certificates')
    hosts = {node.host for node in cluster.node.values()}
    for name, node in cluster.node.items():
        for host in (name, f"{name}.{cluster.cluster.name}"):
            if host != node.host and host in hosts:
                why = f"is the host of other nodes, whose certificates name {host} and so this node: rename one"
                yield Mistake(f"node.{name}", why)
                break


def _link_time_mistakes(section: ClusterSection) -> Iterator[Mistake]:
    """Yield the times of links that contradict each other or are too short."""
    if section.heartbeat_s < HEARTBEAT_S_MIN:
        yield Mistake("cluster.heartbeat_s", f"must be at least {HEARTBEAT_S_MIN:g}")
    if section.silent_s < 2 * section.heartbeat_s:
        yield Mistake("cluster.silent_s", f"must be at least two beats of {section.heartbeat_s:g} s")
    if section.stalled_s < section.silent_s:
        yield Mistake("cluster.stalled_s", f"must be at least silent_s ({section.silent_s:g})")


def _leg_mistakes(
    cluster: Cluster, engine: EngineSection, path: str, legs: Collection[tuple[str, str]]
) -> Iterator[Mistake]:
    """Yield the mistakes about the leg of an engine: prefills and decodes of a model need each other.

    An encoder needs an engine for prompts. `legs` has the model and the leg of every engine.
    """
    if engine.worker_leg not in {Leg.BOTH, Leg.EMBED} and not cluster.cluster.join:
        others = {"prefill": ("decode",), "decode": ("prefill",), "encode": ("both", "prefill")}[engine.leg]
        if not any((engine.model, other) in legs for other in others):
            why = f"there is no engine of the same model whose leg is {' or '.join(others)}"
            yield Mistake(f"{path}.leg", f"means nothing: {why}")
