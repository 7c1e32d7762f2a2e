"""What can be known before anything starts: the tree, every limit, and what stands in the way."""

from __future__ import annotations

import socket
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.kit.offload import run_inline
from protocol.errors import StartFailed
from protocol.greeting import names_node, shown
from supervisor.config.limits import WILDCARD
from supervisor.config.load import LOOPBACK_HOSTS, WILDCARD_HOSTS, Cluster, Misconfigured
from supervisor.engines.sglang.libraries import check_libraries
from supervisor.files import permissions, reading
from supervisor.gateway.keys import ADMIN, KEYS, Keys, KeySources
from supervisor.launcher import descriptor_needs
from supervisor.links.tls import LinkTls, load_link_tls
from supervisor.links.websocket import Endpoint
from supervisor.node.assembly import assemble
from supervisor.node.credentials import Credentials
from supervisor.processes.process import GracePeriods
from supervisor.processes.run_folder import RunFolder
from supervisor.runtime import Runtime
from supervisor.supervision.tree import render
from supervisor.telemetry.metrics import Metrics

SECRET = "ESPALIER_CLUSTER_SECRET"  # noqa: S105  # the name of a variable
SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 64 * 1024
ENGINE_BYTES = 700 * 1024 * 1024  # of an engine's processes beside its weights; what a zygote shares is counted once


def pick(cluster: Cluster, name: str | None) -> tuple[str, ...]:
    """Return the nodes to run: the one that is named, else those that the file places on this host.

    The only node of a file runs wherever it is asked to. Raises `StartFailed` if there is none to run.
    """
    if name is not None:
        if name not in cluster.node:
            raise StartFailed(f"there is no node {name}; there is {', '.join(cluster.node)}")
        return (name,)
    if len(cluster.node) == 1:
        return tuple(cluster.node)
    here = {host: is_local_host(host) for host in {node.host for node in cluster.node.values()}}
    names = tuple(name for name, node in cluster.node.items() if here[node.host])
    if not names:
        places = ", ".join(f"{name} on {node.host}" for name, node in cluster.node.items())
        raise StartFailed(
            f"the file places no node on this host, {socket.gethostname()}: {places}; or name one with --node"
        )
    return names


def is_local_host(host: str) -> bool:
    """Whether a host is this one: by its name, or by one of its addresses, loopback's included."""
    if host in {*LOOPBACK_HOSTS, socket.gethostname()}:
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    """Whether this host has an address, which only then can be bound."""
    if address[0] in WILDCARD_HOSTS:
        return False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def text(cluster: Cluster, name: str, environment: Mapping[str, str]) -> str:
    """Return one node's tree with every limit, and who may come in; opens nothing but files."""
    nowhere = Path(tempfile.gettempdir())
    world = Runtime(
        folder=RunFolder(nowhere, -1),
        logs=nowhere,
        environment=environment,
        new_id=str,
        now=float,
        strftime=str,
        aside=run_inline,
        hurry=GracePeriods(),
        metrics=Metrics(),
        chance=lambda _: _NoChance(),
        new_nonce=bytes,
        new_room=int,
    )
    if is_local_host(cluster.node[name].host):
        check_libraries(cluster, name)
    known = credentials(cluster, name, environment)
    if is_local_host(cluster.node[name].host):
        check_certificate_names(cluster, name, known.tls)
    tree = f"{render(assemble(cluster, name, world, known).tree)}\n{_of_process(cluster, name)}"
    if cluster.node[name].listen is not None or cluster.cluster.tls_certificate is not None:
        tree = f"{tree}\n{_links(cluster)}"
    return tree if known.keys is None else f"{tree}\n{_admission(cluster, known.keys)}"


def credentials(cluster: Cluster, name: str, environment: Mapping[str, str]) -> Credentials:
    """Return the credentials of a node; raises `StartFailed` if any cannot be read or would let everybody in."""
    certificate = cluster.certificate if cluster.gateway.node == name else None
    return Credentials(
        keys=keys(cluster, environment) if cluster.gateway.node == name else None,
        watchers=watchers(cluster, name, environment),
        secret=secret(cluster, environment),
        tls=link_tls(cluster),
        certificate=certificate,
        client_tls=None if certificate is None else certificate.context(),
    )


def keys(cluster: Cluster, environment: Mapping[str, str]) -> Keys:
    """Return the keys of clients; raises `StartFailed` if they cannot be read, or if there must be some and are not."""
    known = read_keys(cluster, environment)
    check_client_keys(cluster, known)
    return known


def check_client_keys(cluster: Cluster, known: Keys) -> None:
    """Raise `StartFailed` if everybody could come in from other hosts or pages, or nobody at all."""
    section = cluster.gateway
    where = f"name a file of them as gateway.keys, or set {KEYS}"
    if not known.wanted:
        if section.host not in LOOPBACK_HOSTS:
            raise Misconfigured(
                "gateway.host", f"gateway.host {section.host} is not loopback, so clients need keys: {where}"
            )
        for key in ("names", "origins"):
            if WILDCARD in getattr(section, key):
                said = f'gateway.{key} = ["{WILDCARD}"] opens this server to every web page without keys: {where}'
                raise Misconfigured(f"gateway.{key}", said)
    elif not known.names(admin=False) and not known.names(admin=True):
        raise Misconfigured("gateway.keys", f"there is no key, so nobody could come in: {where}")


def watchers(cluster: Cluster, name: str, environment: Mapping[str, str]) -> Keys:
    """Return the keys of who may read a node's numbers; raises `StartFailed` if other hosts could without one."""
    known = read_keys(cluster, environment)
    check_metrics_keys(cluster, name, known)
    return known


def check_metrics_keys(cluster: Cluster, name: str, known: Keys) -> None:
    """Raise `StartFailed` if other hosts could read a node's numbers without a key."""
    at = cluster.node[name].metrics
    if at is not None and Endpoint.read(at).host not in LOOPBACK_HOSTS and not known.names(admin=True):
        raise Misconfigured(
            f"node.{name}.metrics",
            f"node.{name}.metrics {at} is not loopback, so whoever reads /metrics needs an admin's key: set {ADMIN},"
            " or say admin = true of a key in the file gateway.keys",
        )


def read_keys(cluster: Cluster, environment: Mapping[str, str]) -> Keys:
    """Return the keys of a file and of the environment; raises `StartFailed` if they cannot be read."""
    known = Keys(KeySources(cluster.keys, {name: environment[name] for name in (KEYS, ADMIN) if name in environment}))
    try:
        known.load()
    except StartFailed as error:
        raise Misconfigured("gateway.keys", str(error)) from error
    return known


def secret(cluster: Cluster, environment: Mapping[str, str]) -> bytes:
    """Return what this cluster's nodes know; raises `StartFailed` where anybody could link without it."""
    section = cluster.cluster
    found = (environment.get(SECRET) or _secret_in_file(cluster)).strip().encode()
    if (found or section.secret is not None) and len(found) < SECRET_BYTES_MIN:
        said = f"the cluster's secret has {len(found)} bytes; take {SECRET_BYTES_MIN} or more"
        raise Misconfigured("cluster.secret", said)
    listening = [(f"node.{name}.listen", node.listen) for name, node in cluster.node.items() if node.listen]
    joined = [(f"cluster.join[{number}]", at) for number, at in enumerate(section.join)]
    outside = [(key, at) for key, at in (*listening, *joined) if Endpoint.read(at).host not in LOOPBACK_HOSTS]
    if not found and section.tls_authority is None and outside:
        key, at = outside[0]
        said = f"{at} is not loopback, so links need a secret: name a file of it as cluster.secret, or set {SECRET}"
        raise Misconfigured(key, said)
    return found


def _secret_in_file(cluster: Cluster) -> str:
    if (name := cluster.cluster.secret) is None:
        return ""
    file = cluster.folder / name
    try:
        if (why := permissions.writable_by_others(file)) is not None:
            raise Misconfigured("cluster.secret", why)
        return reading.read(file, SECRET_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured("cluster.secret", f"cluster.secret cannot be read: {error}") from error


def link_tls(cluster: Cluster) -> LinkTls | None:
    """Return how nodes show each other who they are, None for plain links; raises `StartFailed` for unusable files."""
    section = cluster.cluster
    if section.tls_certificate is None or section.tls_key is None or section.tls_authority is None:
        return None
    names = (section.tls_certificate, section.tls_key, section.tls_authority)
    certificate, key, authority = (cluster.folder / name for name in names)
    try:
        reading.check(certificate, key, authority)
        return load_link_tls(certificate, key, authority)
    except (OSError, ssl.SSLError) as error:
        said = f"the certificates of [cluster] cannot be used: {error}"
        raise Misconfigured("cluster.tls_certificate", said) from error


def check_certificate_names(cluster: Cluster, name: str, tls: LinkTls | None) -> None:
    """Raise `Misconfigured` if this node's certificate must name it, and does not: no other node would take it."""
    own = None if tls is None or not cluster.cluster.verifies_node_names else tls.names
    if own is not None and not names_node(own, name, cluster.cluster.name):
        said = f'names {shown(own)}, and must name node {name} with tls_names = "nodes": DNS:{name}, say'
        raise Misconfigured("cluster.tls_certificate", f"{cluster.cluster.tls_certificate} {said}")


def _links(cluster: Cluster) -> str:
    """Return in a line how nodes know each other."""
    section = cluster.cluster
    if section.tls_certificate is None:
        return "links: plain"
    names = "the nodes that show them" if section.verifies_node_names else "the hosts that are dialed"
    return f"links: TLS with {section.tls_certificate}; certificates must name {names} (tls_names)"


def _of_process(cluster: Cluster, name: str) -> str:
    """Return the limits of a node that are no actor's, but of its process."""
    section = cluster.node[name]
    return (
        f"event loop: {section.turn_max_s:g} s a turn, hung after {section.watchdog_s:g} s without one\n"
        f"log: {section.log_queue_lines_max:,} lines, {section.log_queue_bytes_max:,} bytes wait to be read;"
        f" what engines say: {section.output_log_bytes_max:,} bytes each\n{descriptor_needs.check(cluster, name)}"
    )


def _admission(cluster: Cluster, known: Keys) -> str:
    """Return in a few lines who may come in; names, never secrets."""
    section = cluster.gateway
    tls = "plain" if section.tls_certificate is None else f"TLS with {section.tls_certificate}"
    admins = ", ".join(known.names(admin=True)) or ("nobody" if known.wanted else "everybody")
    of_keys = [(name, own) for name, own in known.grammars().items() if own is not None]
    lines = [
        f"clients: {', '.join(known.names(admin=False)) or 'nobody'}"
        if known.wanted
        else "clients: everybody, no keys",
        f"admin: {admins}",
        f"names: {', '.join(section.names)}; web pages of: {', '.join(section.origins) or 'the same names'}; {tls}",
        f"grammars: {_listed(section.grammars)}{''.join(f'; of {key}: {_listed(own)}' for key, own in of_keys)}",
    ]
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def ahead(cluster: Cluster, *names: str) -> None:
    """Raise `StartFailed`, in one sentence, for what would only fail after seconds of starting these nodes."""
    if cluster.gateway.node in names:
        _port_is_free(cluster.gateway.host, cluster.gateway.port, "gateway.port")
    for name in names:
        if (listen := cluster.node[name].listen) is not None:
            at = Endpoint.read(listen)
            _port_is_free(at.host, at.port, f"node.{name}.listen")
        if (metrics := cluster.node[name].metrics) is not None:
            at = Endpoint.read(metrics)
            _port_is_free(at.host, at.port, f"node.{name}.metrics")
        for key, engine in cluster.engines_on(name).items():
            if engine.dist_port is not None:
                _port_is_free("0.0.0.0", engine.dist_port, f"engine.{key}.dist_port")  # noqa: S104  # as SGLang has it
        descriptor_needs.check(cluster, name)
    check_libraries(cluster, *names)
    _memory_is_there(cluster, names)


def _port_is_free(host: str, port: int, key: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = error.strerror or error
            raise StartFailed(f"port {port} of {host} cannot be had: {why}; name another as {key}") from error


def _memory_is_there(cluster: Cluster, names: Sequence[str]) -> None:
    """Compare what the engines on the CPU will need with what the machine has left."""
    engines = [engine for name in names for engine in cluster.engine.values() if name in engine.nodes]
    on_cpu = [engine for engine in engines if engine.device == "cpu"]
    needed = sum(ENGINE_BYTES + _weights(cluster.model_path(each.model)) // len(each.nodes) for each in on_cpu)
    available = _available()
    if available is not None and needed > available:
        raise StartFailed(
            f"too little memory: {len(on_cpu)} engines on the CPU need about {needed / 2**30:.1f} GiB,"
            f" and {available / 2**30:.1f} GiB are available"
        )


def _weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _available() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


class _NoChance:
    """Chance where nothing runs."""

    def random(self) -> float:
        """Refuse: nobody should ask."""
        raise AssertionError("nothing runs")
