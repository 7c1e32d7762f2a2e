"""The reload of a node's file while it runs: apply what can be applied at once, and report what takes a restart.

The file is read and checked as a whole, with all files that it names, before any of it is applied: a file with a
mistake changes nothing but keys and certificates, which are read by themselves. Values are compared with those in
force, key by key, and each difference is reported in a sentence. Only one reload runs at a time. Files are read in a
thread; the values of the file are applied in one turn, so that no request sees half of them.

A key that needs a socket, a process or a tokenizer to be made again is never applied: that takes a restart.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Collection, Mapping
from functools import partial

import trio
from attrs import define, evolve, field, frozen

from actors.routing.policies import POLICIES
from protocol.cluster import Reloaded
from protocol.errors import InternalError, StartFailed
from supervisor.cluster import link_credentials
from supervisor.config.load import Loaded
from supervisor.config.schema import Cluster, NodeSection
from supervisor.engines.children import offers_of
from supervisor.files.reading import FileReader
from supervisor.gateway import client_keys
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import Keys
from supervisor.gateway.origins import Origins
from supervisor.links.tls import LinkTls
from supervisor.node import file_checks
from supervisor.node.assembly import Assembly
from supervisor.node.credentials import read_credentials
from supervisor.node.file_changes import RESTART, Change, changes, describe_applied, describe_unapplied, value_at
from supervisor.node.router_child import RELOADABLE, limits
from supervisor.threads.file_threads import FileThreads

log = logging.getLogger(__name__)

ROUTERS_KEYS = (*RELOADABLE, "grid", "ttft_target_ms", "itl_target_ms")  # of models; nodes without a gateway read none
SILENCE_KEYS = ("heartbeat_s", "silent_s", "stalled_s")
LINK_KEYS = ("streams_max", *SILENCE_KEYS, "tls_names")
TLS_FILES = ("tls_certificate", "tls_key", "tls_authority")
ADMISSION_KEYS = ("requests_max", "admit_s", "waiting_max")
RUNNER_KEYS = ("first_token_s", "total_s")


class _NotInFile(StartFailed):
    """The file is valid, but no longer contains this node."""


@frozen
class _FileContents:
    """The file as it is now, and all that it names: everything is read before anything is applied."""

    cluster: Cluster
    differences: tuple[Change, ...]  # from the file at the start
    secret: bytes = field(repr=False)
    tls: LinkTls | None
    keys: Keys | None = None  # of clients, if this node has the gateway
    context: ssl.SSLContext | None = None  # of its certificate


@define(eq=False)
class _Outcome:
    """The outcome of a reload: what changed, what takes a restart, what is wrong, which nodes the launcher starts."""

    changed: list[str] = field(factory=list)
    unchanged: list[str] = field(factory=list)
    refused: list[str] = field(factory=list)
    starts: list[str] = field(factory=list)


@define(eq=False)
class _NextReload:
    """The next reload, shared by all requests that come before it begins."""

    wanted: trio.Event = field(factory=trio.Event)
    done: trio.Event = field(factory=trio.Event)
    result: Reloaded | None = None  # None: it was ended by a bug


@define(eq=False)
class Reloader:
    """The reloads of one node; `loaded` is its file as it was when the node started."""

    name: str
    loaded: Loaded
    assembly: Assembly
    environment: Mapping[str, str] = field(repr=False)
    set_drain_s: Callable[[float], None]
    ask_launcher: Callable[[], None] | None = None  # to start the nodes that are new in the file
    reads: FileReader = field(factory=FileThreads)
    _applied: dict[tuple[str, ...], object] = field(factory=dict)  # values applied since the start, by path
    _new: set[str] = field(factory=set)  # nodes of this host that were added to the file since the start
    _placed: set[str] = field(init=False)  # the nodes of this host in the latest version of the file
    _next: _NextReload = field(factory=_NextReload)

    def __attrs_post_init__(self) -> None:
        self._placed = self._nodes_of_host(self.loaded.cluster)

    def ask(self) -> None:
        """Request a reload of the file, the keys and the certificate, without waiting for it."""
        self._next.wanted.set()

    async def reload(self) -> Reloaded:
        """Reload the file, the keys and the certificate, and return a sentence for each difference.

        A file that cannot be read, takes too long to read, or has a mistake in it changes nothing but the keys. Raises
        `InternalError` if a bug ended the reload.
        """
        request = self._next
        self.ask()
        await request.done.wait()
        if request.result is None:
            raise InternalError("the node made a mistake; its log has the details")
        return request.result

    async def check_start(self) -> None:
        """Check that this node could start with its file as it is now; raises `StartFailed`."""
        await self.reads(self._read_as_at_start)

    def _read_as_at_start(self) -> None:
        read_credentials(self._read().cluster, self.name, self.environment)

    async def run(self) -> None:
        """Serve requests for reloads, one reload after the other, until cancelled.

        This is a task of the node, so that a reload that has begun is completed even if its caller leaves.
        """
        while True:
            await self._next.wanted.wait()
            request, self._next = self._next, _NextReload()
            try:
                request.result = await self._reload()
            except Exception:  # a node must not end because of what is in a file
                log.exception("a bug ended a reload")
            finally:
                request.done.set()

    async def _reload(self) -> Reloaded:
        outcome, bug = _Outcome(), None
        try:
            read = await self.reads(self._read)
            self._apply_all(read, outcome)
            outcome.starts += self._nodes_to_start(read.cluster)
        except _NotInFile as error:
            outcome.unchanged.append(f"the file changes nothing: {error}")
        except StartFailed as error:
            log.error("the file changes nothing", extra={"reason": str(error)})  # noqa: TRY400  # no traceback
            outcome.refused.append(f"the file changes nothing: {error}")
        except Exception as error:  # noqa: BLE001  # raised below: a key that was taken out is revoked whatever is wrong
            bug = error
        if (gateway := self.assembly.gateway or self.assembly.monitoring) is not None:
            before = gateway.keys.digests
            refused = await gateway.reload(self.reads)
            outcome.refused += refused
            if gateway.keys.wanted and not any(sentence.startswith("the keys") for sentence in refused):
                outcome.changed.append(_describe_keys(before, gateway.keys.digests))
        if bug is not None:
            raise bug
        if self.ask_launcher is not None:
            self.ask_launcher()
        if not outcome.refused:
            log.info("read the file anew", extra={"changed": outcome.changed, "unchanged": outcome.unchanged})
        return Reloaded(*map(tuple, (outcome.changed, outcome.unchanged, outcome.starts, outcome.refused)))

    def _read(self) -> _FileContents:
        """Read the file and all that it names; raises `StartFailed` if this node could not start with it."""
        examine = partial(file_checks.mistakes, environment=self.environment)
        new = self.loaded.again(examine).cluster
        if self.name not in new.node:
            raise _NotInFile(f"there is no node {self.name} in {self.loaded.file} any more; drain it if it is to go")
        keys, context = None, None
        if self.assembly.gateway is not None and self.name in new.gateway_nodes:
            keys = client_keys.client_keys(new, self.environment)
            context = None if new.certificate is None else new.certificate.context()
        secret, tls = link_credentials.cluster_secret(new, self.environment), link_credentials.link_tls(new)
        link_credentials.check_certificate_names(new, self.name, tls)
        differences = (each for each in changes(self.loaded.cluster, new) if each.path[0] != "processes")  # but nodes
        return _FileContents(new, tuple(differences), secret, tls, keys, context)

    def _apply_all(self, read: _FileContents, outcome: _Outcome) -> None:
        differences = {change.path: change for change in read.differences}
        for path in self._applied:  # a value that has returned to that of the start is a change too
            differences.setdefault(path, Change(path, None, value_at(self.loaded.cluster, path)))
        unapplied: dict[str, list[str]] = {}  # keys of engines and models by section, without their values: secrets
        for difference in differences.values():
            change = evolve(difference, old=self._applied.get(difference.path, difference.old))
            if change.old == change.new or (applied := self._apply(change, read)) is None:  # it is for other nodes
                continue
            if applied:
                self._record(change, read.cluster, outcome)
            elif change.path[0] in {"engine", "model"}:
                unapplied.setdefault(" ".join(change.path[:2]), []).append(".".join(change.path[2:]))
            else:
                outcome.unchanged.append(describe_unapplied(change))
        for section, names in unapplied.items():
            keys = ", ".join(filter(None, names))
            outcome.unchanged.append(
                f"{section} stays as it is {RESTART}{f', though the file has another {keys}' if keys else ''}"
            )
        if (links := self.assembly.links) is not None:
            if links.secret != read.secret:
                outcome.unchanged.append(f"the cluster's secret stays as it was {RESTART}")
            if links.tls is not None and read.tls is not None:
                links.tls = read.tls  # the contents of its files may have changed

    def _nodes_to_start(self, new: Cluster) -> list[str]:
        """Return the nodes that the launcher of this one may start now: those new on its host that have no link yet.

        Other nodes without a link may have been drained, and the launcher starts no such node again.
        """
        before, self._placed = self._placed, self._nodes_of_host(new)
        self._new = self._placed & (self._new | self._placed - before)
        if self.ask_launcher is None:
            return []
        directory = self.assembly.directory
        return [name for name in new.node if name in self._new and directory.node(name).link is None]

    def _nodes_of_host(self, cluster: Cluster) -> set[str]:
        host = cluster.node[self.name].host
        return {name for name, node in cluster.node.items() if node.host == host}

    def _record(self, change: Change, new: Cluster, outcome: _Outcome) -> None:
        """Record a change as applied, and whether the launcher now starts a new node because of it."""
        self._applied[change.path] = change.new
        outcome.changed.append(describe_applied(change))
        if isinstance(change.new, NodeSection) and change.old is None and self.ask_launcher is not None:
            name = change.path[1]
            if new.node[name].host == new.node[self.name].host:
                outcome.changed[-1] += ", and the launcher here starts it"

    # Applying a change ------------------------------------------------------------------

    def _apply(self, change: Change, read: _FileContents) -> bool | None:
        """Apply one change; return False if it takes a restart, None if it does not concern this node."""
        new = read.cluster
        match change.path:
            case ("gateway", *keys):
                return self._apply_to_gateway(tuple(keys), read)
            case ("cluster", key):
                return self._apply_to_links(key, read)
            case ("node", name, *keys):
                return self._apply_to_nodes(name, tuple(keys), change, new)
            case ("model", name, *keys):
                return self._apply_to_model(name, tuple(keys), new)
            case ("engine", name, *_):
                versions = (self.loaded.cluster.engine.get(name), new.engine.get(name))
                return False if any(engine is not None and self.name in engine.nodes for engine in versions) else None
        concerns_gateways = change.path[0] == "pool"
        return None if concerns_gateways and self.assembly.gateway is None else False

    def _apply_to_gateway(self, keys: tuple[str, ...], read: _FileContents) -> bool | None:
        gateway, section = self.assembly.gateway, read.cluster.gateway
        if gateway is None:
            return False if keys == ("nodes",) and self.name in section.nodes else None
        match keys:
            case (key,) if key in ADMISSION_KEYS:
                # Processors have as many places as at the start, so more requests than then are never admitted.
                requests_max = min(section.requests_max, self.loaded.cluster.gateway.requests_max)
                gateway.gate.change(requests_max, section.admit_s, section.waiting_max)
                if key == "requests_max":
                    self._applied["gateway", key] = requests_max  # not the file's: the next reload compares with it
                return key != "requests_max" or requests_max == section.requests_max
            case (key,) if key in RUNNER_KEYS:
                setattr(gateway.runner, key, getattr(section, key))
            case ("prompt_tokens_max",):
                self.assembly.reloadable.prompt_tokens_max = section.prompt_tokens_max
            case ("allowed_hosts" | "allowed_origins" | "grammars",):
                gateway.origins = Origins(frozenset(section.allowed_hosts), frozenset(section.allowed_origins))
                gateway.grammars = frozenset(section.grammars)
            case ("keys" | "nodes",) if read.keys is not None:  # None: the new file has no gateway here
                divides = _read_keys_from(gateway, read.keys) and self._divide_rates(gateway, read)
                return divides or (keys == ("keys",) and gateway.keys.sources is read.keys.sources)
            case ("tls_certificate" | "tls_key",):
                return _apply_certificate(gateway, read)
            case ("limits", key) if key != "send_buffer_bytes":  # which belongs to the listening socket
                gateway.limits = evolve(gateway.limits, **{key: getattr(section.limits, key)})
            case _:
                return False
        return True

    def _divide_rates(self, gateway: Gateway, read: _FileContents) -> bool:
        """Divide the rates of keys by the number of gateways; return False if that takes a restart.

        A gateway cannot begin to share its port while it runs, so clients reach it alone, with their whole rates.
        """
        if read.keys is None or (len(read.cluster.port_sharers(self.name)) > 1) != gateway.shares_port:
            return False
        gateway.keys.gateways = read.keys.gateways
        return True

    def _apply_to_links(self, key: str, read: _FileContents) -> bool | None:
        links = self.assembly.links
        if links is None:
            return None
        if key in LINK_KEYS and (key != "tls_names" or links.tls is not None):
            links.section = evolve(links.section, **{key: getattr(read.cluster.cluster, key)})
            return True
        return key in TLS_FILES and links.tls is not None and read.tls is not None

    def _apply_to_nodes(self, name: str, keys: tuple[str, ...], change: Change, new: Cluster) -> bool | None:
        assembly = self.assembly
        if name == self.name:
            if keys == ("drain_s",):
                self.set_drain_s(new.node[name].drain_s)
            return keys == ("drain_s",)
        if keys and keys != ("listen",):
            return None
        section = new.node.get(name)
        if section is None or assembly.links is None:
            return False
        if isinstance(change.old, NodeSection) and change.old.listen == section.listen:  # applied by an earlier reload
            return None
        if section.listen is None and change.old is not None:  # an address, once known, stays known
            return False
        offers = [each for key, engine in new.engines_on(name).items() for each in offers_of(key, engine)]
        address = section.dial_address
        routes = name in new.gateway_nodes
        assembly.directory.configure(name, None if address is None else str(address), offers, routes=routes)
        assembly.directory.notify()  # wakes the task that dials nodes
        return True

    def _apply_to_model(self, name: str, keys: tuple[str, ...], new: Cluster) -> bool | None:
        routing, section = self.assembly.reloadable.routings.get(name), new.model.get(name)
        if keys == ("policy",) and self._tell_nothing(name, new):
            return False
        if self.assembly.gateway is None:
            engines = (*self.loaded.cluster.engines_on(self.name).values(), *new.engines_on(self.name).values())
            is_served_here = any(engine.model == name for engine in engines)
            return False if is_served_here and not (keys and keys[0] in ROUTERS_KEYS) else None
        if routing is None or section is None or not keys or keys[0] not in RELOADABLE:
            return False
        if keys[0] == "policy":  # else it keeps what it remembers
            context = self.assembly.reloadable.policies[name]
            context.index.on_stored = None  # which the policy before may have set
            routing.policy = POLICIES[section.policy](context)
            self.assembly.directory.notify()  # wakes whoever follows the workers' prefix caches for it
        routing.prefill_tokens_min = section.prefill_tokens_min
        routing.limits = limits(section)
        return True

    def _tell_nothing(self, model: str, new: Cluster) -> bool:
        """Whether a policy needs to hear of the blocks in engines that this node has started as silent ones."""
        return any(
            engine.model == model and engine.publishes(new) and not engine.publishes(self.loaded.cluster)
            for engine in self.loaded.cluster.engines_on(self.name).values()
        )


def _read_keys_from(gateway: Gateway, keys: Keys) -> bool:
    """Read the keys from the places of `keys` from now on; return False if that takes a restart.

    Without its keys, a gateway that wants some would serve nobody; to serve everybody, it has to start anew.
    """
    if gateway.keys.wanted and not keys.wanted:
        return False
    gateway.keys.sources = keys.sources
    return True


def _describe_keys(before: Collection[tuple[str, str]], now: Collection[tuple[str, str]]) -> str:
    """Return the sentence about the keys of clients, each of them a name and a digest."""
    new, revoked = len(set(now).difference(before)), len(set(before).difference(now))
    counts = f" ({new} new, {revoked} revoked)" if new or revoked else ""
    return f"keys: {len(now)} are known now{counts}"


def _apply_certificate(gateway: Gateway, read: _FileContents) -> bool:
    """Use another certificate for new connections of clients; to turn TLS on or off takes a restart."""
    if gateway.certificate is None or read.context is None:
        return False
    gateway.certificate, gateway.tls = read.cluster.certificate, read.context
    return True
