"""What is wrong in `cluster.toml` between keys that are each right by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from math import inf
from pathlib import Path

from attrs import asdict

from actors.engines.sglang import setting_rules
from actors.engines.sglang.boot_message import GrammarLimits
from protocol.cluster import OPERATOR_PREFIX
from protocol.strict.mistakes import Mistake, describe, join, segment
from supervisor.config import listener_checks, time_checks
from supervisor.config.limits import WILDCARD
from supervisor.config.schema import (
    LOOPBACK_HOSTS,
    WILDCARD_HOSTS,
    Cluster,
    ClusterSection,
    EngineSection,
    SimulatedSection,
)
from supervisor.engines.sglang.bootstrap_ports import BOOTSTRAP_PORTS

RESERVED = ("gateway", "links", "metrics", "zygote")
BEAT_S_MIN = 0.01
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@\\]+")


def is_host(text: str) -> bool:
    """Whether a text is a host's name, or an address without brackets or port."""
    try:
        return HOST.fullmatch(text) is not None or bool(ip_address(text.partition("%")[0]))
    except ValueError:
        return False


def cross_check(cluster: Cluster) -> Iterator[Mistake]:
    """Yield every mistake."""
    if cluster.gateway.node not in cluster.node and not cluster.cluster.join:
        yield Mistake("gateway.node", f"there is no node {cluster.gateway.node}; there is {', '.join(cluster.node)}")
    for name, model in cluster.model.items():
        at = join("model", segment(name))
        if all(engine.model != name for engine in cluster.engine.values()):
            yield Mistake(at, "no engine serves it")
        if any(name.replace("/", ":") == other.replace("/", ":") for other in cluster.model if other != name):
            yield Mistake(at, "differs from another model's name by nothing but / and :")
        yield from _folder_is_missing(cluster, name, at)
        if model.template is not None:
            yield from _file_is_missing(cluster, model.template, f"{at}.template")
    yield from _nodes_disagree(cluster)
    yield from listener_checks.collisions(cluster)
    yield from time_checks.mistakes(cluster)
    yield from _gateway_disagrees(cluster)
    for name, engine in cluster.engine.items():
        at = join("engine", segment(name))
        if name in RESERVED or name.startswith(("processor-", "router-", "grammars-")):
            yield Mistake(at, "is the name of another part of the tree")
        yield from _engine_disagrees(cluster, engine, at)


def _folder_is_missing(cluster: Cluster, name: str, at: str) -> Iterator[Mistake]:
    try:
        folder = cluster.model_path(name)
        if not folder.is_dir():
            yield Mistake(f"{at}.path", f"there is no folder {folder}")
    except (OSError, RuntimeError) as error:  # a user that does not exist, a link to itself
        yield Mistake(f"{at}.path", f"is no folder: {error}")


def _file_is_missing(cluster: Cluster, name: str, at: str) -> Iterator[Mistake]:
    file = cluster.folder / name
    if not file.exists():
        yield Mistake(at, f"there is no file {file}")
    elif not file.is_file():
        yield Mistake(at, f"{file} is a {'folder' if file.is_dir() else 'device'}, not a file")


def _gateway_disagrees(cluster: Cluster) -> Iterator[Mistake]:
    gateway = cluster.gateway
    for index, name in enumerate(gateway.names):
        if name != WILDCARD and not is_host(name):
            yield Mistake(f"gateway.names[{index}]", f"must be a host without scheme or port, got {describe(name)}")
    if gateway.host and not is_host(gateway.host):
        yield Mistake("gateway.host", f"must be a host or an address without brackets, got {describe(gateway.host)}")
    if gateway.host in WILDCARD_HOSTS and not gateway.names:
        every = f"{gateway.host or 'an empty host'} is every address"
        yield Mistake("gateway.names", f"is missing: {every}, so say what clients call this server")
    for key in ("keys", "tls_certificate", "tls_key"):
        if (file := getattr(gateway, key)) is not None:
            yield from _file_is_missing(cluster, file, f"gateway.{key}")
    if (gateway.tls_certificate is None) != (gateway.tls_key is None):
        one, other = ("tls_certificate", "tls_key")[:: 1 if gateway.tls_key is None else -1]
        yield Mistake(f"gateway.{one}", f"means nothing without {other}")
    for index, origin in enumerate(gateway.origins):
        if origin != WILDCARD and not ORIGIN.fullmatch(origin.lower()):
            yield Mistake(
                f"gateway.origins[{index}]", f"must be like https://app.example, without a path; got {describe(origin)}"
            )


def _engine_disagrees(cluster: Cluster, engine: EngineSection, at: str) -> Iterator[Mistake]:
    if engine.model not in cluster.model:
        yield Mistake(f"{at}.model", f"there is no model {engine.model}; there is {', '.join(cluster.model)}")
    if engine.node not in cluster.node:
        yield Mistake(f"{at}.node", f"there is no node {engine.node}; there is {', '.join(cluster.node)}")
    yield from _leg_disagrees(cluster, engine, at)
    yield from _ranks_disagree(cluster, engine, at)
    yield from (_only_sglangs if engine.kind == "simulated" else _only_simulated)(engine, at)
    # SGLang keeps a page, and ends requests without a token where there is only one more.
    pages, words = (3, "three") if engine.kind == "sglang" else (2, "two")
    if engine.kv_tokens_max < pages * engine.page_size:
        yield Mistake(f"{at}.kv_tokens_max", f"is less than {words} pages of {engine.page_size} tokens")
    if engine.context_max == 1:
        yield Mistake(f"{at}.context_max", "leaves no room for a prompt and an answer")
    for name in engine.environment:
        if not name or "=" in name:
            yield Mistake(f"{at}.environment{segment(name)}", "is no name of a variable")
    for table, times in (("deadlines", asdict(engine.deadlines)), ("ladder", asdict(engine.ladder))):
        for key, value in times.items():
            if not 0 < value < inf:
                yield Mistake(f"{at}.{table}.{key}", f"must be above 0 and finite, got {value}")


def _only_simulated(engine: EngineSection, at: str) -> Iterator[Mistake]:
    for key, value in engine.settings.items():
        if (why := setting_rules.wrong(key, value)) is not None:
            yield Mistake(join(f"{at}.settings", segment(key)), why)
    if engine.device is None:
        yield Mistake(f"{at}.device", 'is missing; expected "cpu" or "cuda"')
    if engine.simulated != SimulatedSection():
        yield Mistake(f"{at}.simulated", 'is for engines of kind "simulated"')


def _nodes_disagree(cluster: Cluster) -> Iterator[Mistake]:
    """Yield what keeps two nodes from finding each other."""
    deaf = [name for name, node in cluster.node.items() if node.listen is None]
    for name in deaf[1:]:
        yield Mistake(f"node.{name}.listen", f"is missing: {deaf[0]} does not listen either, so they cannot meet")
    for name, node in cluster.node.items():
        if name.startswith(OPERATOR_PREFIX):
            yield Mistake(f"node.{name}", f"is an operator's name: no node's begins with {OPERATOR_PREFIX}")
        if not is_host(node.host):
            yield Mistake(f"node.{name}.host", f"must be a host or an address, got {describe(node.host)}")
        if node.logs is not None and (logs := Path(node.logs)).exists() and not logs.is_dir():
            yield Mistake(f"node.{name}.logs", f"{logs} is no folder")
    yield from _links_disagree(cluster)


def _links_disagree(cluster: Cluster) -> Iterator[Mistake]:
    """Yield what is wrong in `[cluster]`."""
    listening = {node.listen: name for name, node in cluster.node.items()}
    for index, address in enumerate(cluster.cluster.join):
        if address in listening:
            yield Mistake(f"cluster.join[{index}]", f"is where node {listening[address]} of this file listens")
    section = cluster.cluster
    for key in ("secret", "tls_certificate", "tls_key", "tls_authority"):
        if (file := getattr(section, key)) is not None:
            yield from _file_is_missing(cluster, file, f"cluster.{key}")
    tls = [key for key in ("tls_certificate", "tls_key", "tls_authority") if getattr(section, key) is not None]
    if tls and len(tls) < 3:
        yield Mistake(f"cluster.{tls[0]}", "means nothing without tls_certificate, tls_key and tls_authority together")
    if section.verifies_node_names:
        yield from _names_disagree(cluster)
    for name in cluster.node:
        slots = sum(engine.slots for engine in cluster.engines_on(name).values())
        if name != cluster.gateway.node and slots > section.streams_max:
            yield Mistake(
                "cluster.streams_max", f"is {section.streams_max}, and node {name} has {slots} slots to ask for"
            )
    yield from _times_disagree(section)


def _names_disagree(cluster: Cluster) -> Iterator[Mistake]:
    """Yield what keeps certificates from telling one node from another."""
    if cluster.cluster.tls_certificate is None:
        yield Mistake("cluster.tls_names", 'means nothing without tls_certificate: "nodes" are named by certificates')
    for name, node in cluster.node.items():
        for other in cluster.node.values():
            if other.host != node.host and other.host in {name, f"{name}.{cluster.cluster.name}"}:
                said = f"is the host of other nodes, whose certificates name {other.host} and so this node: rename one"
                yield Mistake(f"node.{name}", said)
                break


def _times_disagree(section: ClusterSection) -> Iterator[Mistake]:
    """Yield which times of links contradict each other, or would keep a node busy with nothing else."""
    if section.heartbeat_s < BEAT_S_MIN:
        yield Mistake("cluster.heartbeat_s", f"must be at least {BEAT_S_MIN:g}")
    if section.silent_s < 2 * section.heartbeat_s:
        yield Mistake("cluster.silent_s", f"must be at least two beats of {section.heartbeat_s:g} s")
    if section.stalled_s < section.silent_s:
        yield Mistake("cluster.stalled_s", f"must be at least silent_s ({section.silent_s:g})")
    if section.retry_min_s > section.retry_max_s:
        yield Mistake("cluster.retry_min_s", f"must be at most retry_max_s ({section.retry_max_s:g})")


def _leg_disagrees(cluster: Cluster, engine: EngineSection, at: str) -> Iterator[Mistake]:
    """Yield what keeps a prefill and a decode from working together."""
    if engine.leg != "both" and not cluster.cluster.join:
        other = "decode" if engine.leg == "prefill" else "prefill"
        if not any(each.model == engine.model and each.leg == other for each in cluster.engine.values()):
            yield Mistake(f"{at}.leg", f"means nothing without an engine of the same model whose leg is {other}")
    if engine.leg == "decode" and engine.pending_prefill_tokens_max is not None:
        yield Mistake(f"{at}.pending_prefill_tokens_max", "is for engines that compute prompts")
    if engine.leg == "prefill" and engine.kind == "sglang":
        if engine.bootstrap_port is None:
            yield Mistake(f"{at}.bootstrap_port", "is missing: decodes find a prefill by it")
        first, host = engine.bootstrap_port, _host(cluster, engine)
        here = ((key, each.bootstrap_port) for key, each in cluster.engine.items() if _host(cluster, each) == host)
        near = [
            key for key, port in here if first is not None and port is not None and abs(port - first) < BOOTSTRAP_PORTS
        ]
        if len(near) > 1:
            said = f"is shared by {' and '.join(near)} on one host, where each has {BOOTSTRAP_PORTS} ports"
            yield Mistake(f"{at}.bootstrap_port", said)
    elif engine.bootstrap_port is not None:
        yield Mistake(f"{at}.bootstrap_port", "is for a prefill of SGLang")


def _ranks_disagree(cluster: Cluster, engine: EngineSection, at: str) -> Iterator[Mistake]:
    """Yield what keeps the ranks of an engine from being one, on however many nodes they are."""
    nodes, stages = len(engine.nodes), engine.settings.get("pp_size", 1)
    ranks = engine.tensor_parallel * (stages if isinstance(stages, int) else 1)
    if engine.device == "cpu" and ranks != nodes:
        yield Mistake(f"{at}.tensor_parallel", f"an engine on a CPU has one rank a node, which are {nodes} here")
    elif ranks % nodes:
        yield Mistake(f"{at}.tensor_parallel", f"makes {ranks} ranks, which {nodes} nodes cannot share equally")
    if nodes > 1:
        yield from _span_disagrees(cluster, engine, at)
    elif engine.dist_port is not None:
        yield Mistake(f"{at}.dist_port", "means nothing without ranks_on")


def _span_disagrees(cluster: Cluster, engine: EngineSection, at: str) -> Iterator[Mistake]:
    """Yield what keeps the nodes that an engine spans from meeting."""
    for index, name in enumerate(engine.ranks_on):
        if name not in cluster.node:
            known = ", ".join(cluster.node)
            yield Mistake(f"{at}.ranks_on[{index}]", f"there is no node {name}; there is {known}")
        elif name in engine.nodes[: index + 1]:
            yield Mistake(f"{at}.ranks_on[{index}]", f"node {name} has a rank of it already")
    hosts = {name: cluster.node[name].host for name in engine.nodes if name in cluster.node}
    alone = [name for name, host in hosts.items() if host in (*LOOPBACK_HOSTS, *WILDCARD_HOSTS)]
    if alone and len({"localhost" if host in LOOPBACK_HOSTS else host for host in hosts.values()}) > 1:
        yield Mistake(f"node.{alone[0]}.host", f"is {hosts[alone[0]]}, where ranks on other hosts do not find its own")
    if engine.dist_port is None:
        yield Mistake(f"{at}.dist_port", "is missing: the ranks meet there, on the host of rank 0")
        return
    own = f"{at}.dist_port"
    others = [
        key for key, *place in _ports(cluster) if key != own and place == [hosts.get(engine.node), engine.dist_port]
    ]
    if others:
        yield Mistake(own, f"is {' and '.join(others)} on the same host")


def _ports(cluster: Cluster) -> Iterator[tuple[str, str | None, int]]:
    """Yield every port that the file names: its key, its host, itself."""
    for name, node in cluster.node.items():
        for key, at in (("listen", node.listen), ("metrics", node.metrics)):
            if at is not None:
                yield f"node.{name}.{key}", node.host, int(at.rpartition(":")[2])
    if cluster.gateway.node in cluster.node:
        yield "gateway.port", cluster.node[cluster.gateway.node].host, cluster.gateway.port
    for name, engine in cluster.engine.items():
        for key, port, count in (
            ("bootstrap_port", engine.bootstrap_port, BOOTSTRAP_PORTS),
            ("dist_port", engine.dist_port, 1),
        ):
            for each in () if port is None else range(port, port + count):
                yield join(join("engine", segment(name)), key), _host(cluster, engine), each


def _host(cluster: Cluster, engine: EngineSection) -> str | None:
    return cluster.node[engine.node].host if engine.node in cluster.node else None


def _only_sglangs(engine: EngineSection, at: str) -> Iterator[Mistake]:
    for key in (
        "device",
        "tensor_parallel",
        "memory_fraction",
        "settings",
        "environment",
        "transfer",
        "ranks_on",
        "dist_port",
    ):
        if getattr(engine, key) not in (None, 1, {}, ()):
            yield Mistake(f"{at}.{key}", "means nothing to a simulated engine")
    if engine.grammars != GrammarLimits():
        yield Mistake(f"{at}.grammars", "means nothing to a simulated engine")
    if engine.simulated.length_min > engine.simulated.length_max:
        yield Mistake(f"{at}.simulated.length_min", f"must be at most length_max ({engine.simulated.length_max})")
