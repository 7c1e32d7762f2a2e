"""A node as `--check` prints it: its tree with every limit, its process, and who may connect.

The tree is assembled by a running node's code, so the output cannot differ from it, but with a runtime without threads,
sockets and random numbers. Nothing is started, and nothing but files is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from actors.kit.offload import run_inline
from actors.kit.shares import BudgetLimits
from protocol.messages.cluster import Leg
from supervisor.cluster import link_credentials
from supervisor.config import placement
from supervisor.config.pools import AxisKeys, GridSection
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import check_host
from supervisor.gateway.keys.keys import Keys
from supervisor.media.filter_check import check_filter
from supervisor.node import descriptor_needs
from supervisor.node.assembly import assemble
from supervisor.node.credentials import Credentials, read_credentials
from supervisor.node.media_child import NAME as MEDIA
from supervisor.node.text_models import format_lines
from supervisor.processes import run_folder
from supervisor.processes.process import GracePeriods
from supervisor.processes.run_folder import RunFolder
from supervisor.runtime import Runtime
from supervisor.supervision.tree import render
from supervisor.telemetry.metrics import Metrics


def describe_node(cluster: Cluster, name: str, environment: Mapping[str, str]) -> str:
    """Return the description of one node; raises `StartFailed` if it could not start on this host with these files."""
    unused = run_folder.base_folder()
    runtime = Runtime(
        folder=RunFolder(unused, -1),
        logs=unused,
        environment=environment,
        new_id=str,
        now=float,
        strftime=str,
        run_in_thread=run_inline,
        grace=GracePeriods(),
        metrics=Metrics(),
        chance=lambda _: _NoRandomSource(),
        new_nonce=bytes,
        new_number=int,
    )
    if placement.is_local_host(cluster.node[name].host):
        check_host(cluster, name)
    credentials = read_credentials(cluster, name, environment)
    assembly = assemble(cluster, name, runtime, credentials)
    if placement.is_local_host(cluster.node[name].host):
        link_credentials.check_certificate_names(cluster, name, credentials.tls)
        if MEDIA in assembly.published:
            check_filter(cluster.gateway.media)
    lines = [render(assembly.tree), _process_lines(cluster, name)]
    if cluster.node[name].listen is not None or cluster.cluster.tls_certificate is not None:
        lines.append(_link_line(cluster, credentials))
    if name in cluster.gateway_nodes:
        lines += [*pool_lines(cluster), *format_lines(cluster)]
    if credentials.keys is not None:
        lines.append(_client_lines(cluster, credentials.keys))
    return "\n".join(lines)


def _link_line(cluster: Cluster, credentials: Credentials) -> str:
    """Return a line about the authentication of nodes."""
    section = cluster.cluster
    if section.tls_certificate is None and credentials.secret:
        return "links: plain; nodes prove the cluster's secret"
    if section.tls_certificate is None:
        made = "" if section.join else "; nodes that one launcher starts make one of their own"
        return f"links: plain; without a secret any user of this machine may link to a node{made}"
    names = "the nodes that show them" if section.verifies_node_names else "the hosts that are dialed"
    return f"links: TLS with {section.tls_certificate}; certificates must name {names} (tls_names)"


def _process_lines(cluster: Cluster, name: str) -> str:
    """Return lines about the limits of a node's process, which belong to no actor."""
    section = cluster.node[name]
    return (
        f"event loop: hung after {section.watchdog_s:g} s without a turn\n{descriptor_needs.check_limit(cluster, name)}"
    )


def _client_lines(cluster: Cluster, keys: Keys) -> str:
    """Return lines about who may connect to the gateway: names of keys, never secrets."""
    section = cluster.gateway
    tls = "plain" if section.tls_certificate is None else f"TLS with {section.tls_certificate}"
    admins = ", ".join(keys.names(admin=True)) or ("nobody" if keys.wanted else "everybody")
    own_grammars = [f"; of {key}: {_listed(kinds)}" for key, kinds in keys.grammars().items() if kinds is not None]
    origins = ", ".join(section.allowed_origins) or "the same names"
    lines = [
        f"clients: {', '.join(keys.names(admin=False)) or 'nobody'}" if keys.wanted else "clients: everybody, no keys",
        f"admin: {admins}",
        *_tenant_lines(keys),
        f"names: {', '.join(section.allowed_hosts)}; web pages of: {origins}; {tls}",
        f"grammars: {_listed(section.grammars)}{''.join(own_grammars)}",
        *(_slot_lines(cluster) if keys.several else ()),
    ]
    return "\n".join(lines)


def _tenant_lines(keys: Keys) -> Iterator[str]:
    """Yield a line about the tenants, if there are several: what they cache is shared by the keys of each."""
    tenants = keys.tenants()
    if tenants.keys() - {""}:
        listed = "; ".join(f"{tenant or 'the default one'} of {', '.join(names)}" for tenant, names in tenants.items())
        yield f"tenants: {listed}"


def _slot_lines(cluster: Cluster) -> Iterator[str]:
    """Yield a line about the slots of each model for one of several keys, and one about KV memory without shares."""
    answering = {Leg.BOTH, Leg.DECODE}
    kept = cluster.gateway.limits.kept_slots * len(cluster.gateway_nodes)
    for name in cluster.model:
        engines = [engine for engine in cluster.engine.values() if engine.model == name]
        slots = sum(engine.slots * engine.data_parallel for engine in engines if engine.worker_leg in answering)
        if not slots:  # its engines compute vectors
            continue
        own = BudgetLimits.of_slots(slots, kept).call_max if kept else slots
        yield f"slots of {name}: {slots:,}, and one key has {own:,} at most; each choice of a request takes one"
    full = [
        name for name, engine in cluster.engine.items() if engine.worker_leg in answering and not engine.shares_memory
    ]
    if full:
        yield f'KV memory: one key may fill that of {", ".join(full)}; admission = "memory" leaves some to others'


def pool_lines(cluster: Cluster) -> list[str]:
    """Return the lines about every grid: the requests that each pool gets."""
    return [line for name in cluster.model for line in _model_lines(cluster, name)]


def _model_lines(cluster: Cluster, model: str) -> Iterator[str]:
    for leg, grid in cluster.model[model].grid.by_leg.items():
        engines = {name for name, engine in cluster.engine.items() if (engine.model, engine.leg) == (model, leg)}
        pools = {name: pool for name, pool in cluster.pool.items() if engines.issuperset(pool.engines)}
        listed = "; ".join(
            f"{name} of priority {pool.priority} with {', '.join(pool.engines)}" for name, pool in pools.items()
        )
        rest = ", ".join(sorted(engines.difference(*(pool.engines for pool in pools.values()))))
        yield f"pools of {model} for {leg}: {listed}{rest and f'; in no pool: {rest}'}"
        yield from _grid_lines(grid)


def _grid_lines(grid: GridSection) -> Iterator[str]:
    lengths = list(_cells(grid.lengths))
    for (low, high), row in zip(lengths, grid.pools, strict=True):
        columns = groupby(zip(_cells(grid.targets), row, strict=True), key=lambda column: column[1])
        spans = [(pool, [cell for cell, _ in cells]) for pool, cells in columns]
        targets = ", ".join(f"{pool} for {cells[0][0]:g} to {cells[-1][1]:g} ms" for pool, cells in spans)
        yield f"  {_spelled(grid.lengths)} {low:,.6g} to {high:,.6g}, {_spelled(grid.targets)}: {targets}"


def _cells(keys: AxisKeys) -> Iterator[tuple[float, float]]:
    """Yield the ends of each cell of an axis."""
    axis = keys.axis
    ends = [axis.low + axis.step * number for number in range(axis.resolution)]
    yield from zip(ends, [*ends[1:], axis.high], strict=True)


def _spelled(keys: AxisKeys) -> str:
    return keys.resolution_key.removesuffix("_resolution")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


class _NoRandomSource:
    """A random source that nothing may use, since nothing runs."""

    def random(self) -> float:
        """Raise `AssertionError`."""
        raise AssertionError("nothing runs")
