"""A node as `--check` prints it: its tree with every limit, and who may connect. Nothing is started."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.kit.offload import run_inline
from supervisor.cluster import link_credentials
from supervisor.config import placement
from supervisor.config.load import Cluster
from supervisor.engines.kinds import check_host
from supervisor.gateway.keys import Keys
from supervisor.node import descriptor_needs
from supervisor.node.assembly import assemble
from supervisor.node.credentials import read_credentials
from supervisor.processes.process import GracePeriods
from supervisor.processes.run_folder import RunFolder
from supervisor.runtime import Runtime
from supervisor.supervision.tree import render
from supervisor.telemetry.metrics import Metrics


def describe_node(cluster: Cluster, name: str, environment: Mapping[str, str]) -> str:
    """Return one node's tree with every limit, and who may come in; opens nothing but files."""
    nowhere = Path(tempfile.gettempdir())
    runtime = Runtime(
        folder=RunFolder(nowhere, -1),
        logs=nowhere,
        environment=environment,
        new_id=str,
        now=float,
        strftime=str,
        run_in_thread=run_inline,
        grace=GracePeriods(),
        metrics=Metrics(),
        chance=lambda _: _NoChance(),
        new_nonce=bytes,
        new_room=int,
    )
    if placement.is_local_host(cluster.node[name].host):
        check_host(cluster, name)
    credentials = read_credentials(cluster, name, environment)
    if placement.is_local_host(cluster.node[name].host):
        link_credentials.check_certificate_names(cluster, name, credentials.tls)
    tree = f"{render(assemble(cluster, name, runtime, credentials).tree)}\n{_of_process(cluster, name)}"
    if cluster.node[name].listen is not None or cluster.cluster.tls_certificate is not None:
        tree = f"{tree}\n{_links(cluster)}"
    return tree if credentials.keys is None else f"{tree}\n{_admission(cluster, credentials.keys)}"


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
        f" what engines say: {section.output_log_bytes_max:,} bytes each\n{descriptor_needs.check_limit(cluster, name)}"
    )


def _admission(cluster: Cluster, known: Keys) -> str:
    """Return in a few lines who may come in; names, never secrets."""
    section = cluster.gateway
    tls = "plain" if section.tls_certificate is None else f"TLS with {section.tls_certificate}"
    admins = ", ".join(known.names(admin=True)) or ("nobody" if known.wanted else "everybody")
    of_keys = [(name, own) for name, own in known.grammars().items() if own is not None]
    origins = ", ".join(section.allowed_origins) or "the same names"
    lines = [
        f"clients: {', '.join(known.names(admin=False)) or 'nobody'}"
        if known.wanted
        else "clients: everybody, no keys",
        f"admin: {admins}",
        f"names: {', '.join(section.allowed_hosts)}; web pages of: {origins}; {tls}",
        f"grammars: {_listed(section.grammars)}{''.join(f'; of {key}: {_listed(own)}' for key, own in of_keys)}",
    ]
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


class _NoChance:
    """Chance where nothing runs."""

    def random(self) -> float:
        """Refuse: nobody should ask."""
        raise AssertionError("nothing runs")
