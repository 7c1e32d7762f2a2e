"""The reload of a node's file while it runs: keys, certificates, allowed hosts, `drain_s` and new nodes.

The file is read and checked as a whole, with all files that it names, before any of it is applied: a file with a
mistake changes nothing but keys and certificates, which are read by themselves. Everything else in the file takes a
restart, which is reported in one sentence: a rolling restart loses no request. Only one reload runs at a time. Files
are read in a thread; the values of the file are applied in one turn, so that no request sees half of them.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import trio
from attrs import define, evolve, field, frozen

from protocol.errors import InternalError, StartFailed
from protocol.messages.cluster import Reloaded
from supervisor.cluster import link_credentials
from supervisor.config.load import Loaded
from supervisor.config.schema import Cluster, EngineSection
from supervisor.config.sections import GatewaySection, NodeSection, machine_of
from supervisor.engines.children import offers_of
from supervisor.files.reading import FileReader
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import client_keys
from supervisor.gateway.keys.keys import Keys
from supervisor.gateway.origins import Origins
from supervisor.links.tls import LinkTls
from supervisor.node.assembly import Assembly
from supervisor.node.credentials import read_credentials
from supervisor.node.reload import file_checks
from supervisor.threads.file_threads import FileThreads

log = logging.getLogger(__name__)

LINK_FILES = ("tls_certificate", "tls_key", "tls_authority")


class _NotInFile(StartFailed):
    """The file is valid, but no longer contains this node."""


@frozen
class _FileContents:
    """The file as it is now, and all that it names: everything is read before anything is applied."""

    cluster: Cluster
    secret: bytes = field(repr=False)
    tls: LinkTls | None
    keys: Keys | None = None  # of clients, if this node has the gateway
    context: ssl.SSLContext | None = None  # of its certificate


@define(eq=False)
class _Outcome:
    """The outcome of a reload: changes, changes that take a restart, mistakes, and new nodes for the launcher."""

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
    ask_launcher: Callable[[], None] | None = None  # to start the nodes that are new in the file
    reads: FileReader = field(factory=FileThreads)
    _applied: Cluster = field(init=False)  # the file of the start, with what later reloads have applied
    _nodes: set[str] = field(init=False)  # of the latest version of the file
    _next: _NextReload = field(factory=_NextReload)

    def __attrs_post_init__(self) -> None:
        self._applied, self._nodes = self.loaded.cluster, {*self.loaded.cluster.node}

    @property
    def drain_s(self) -> float:
        """The time in which streams may finish in a drain, as of the latest reload."""
        return self._applied.node[self.name].drain_s

    def ask(self) -> None:
        """Request a reload of the file, the keys and the certificate, without waiting for it."""
        self._next.wanted.set()

    async def reload(self) -> Reloaded:
        """Reload the file, the keys and the certificate, and return sentences about applied and other changes.

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

        This is a task of the node, so a begun reload is completed even if its caller leaves.
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
            self._apply(await self.reads(self._read), outcome)
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
        examine = partial(file_checks.mistakes, environment=self.environment, node=self.name)
        new = self.loaded.again(examine).cluster
        if self.name not in new.node:
            raise _NotInFile(f"there is no node {self.name} in {self.loaded.file} any more; drain it if it is to go")
        keys, context = None, None
        if self.assembly.gateway is not None and self.name in new.gateway_nodes:
            keys = client_keys.client_keys(new, self.environment)
            context = None if new.certificate is None else new.certificate.context()
        secret, tls = link_credentials.cluster_secret(new, self.environment), link_credentials.link_tls(new)
        link_credentials.check_certificate_names(new, self.name, tls)
        return _FileContents(new, secret, tls, keys, context)

    # What is applied --------------------------------------------------------------------

    def _apply(self, read: _FileContents, outcome: _Outcome) -> None:
        """Apply the changes that can be, and name the parts of the file with other ones, for a restart."""
        new, applied = read.cluster, self._applied
        own = new.node[self.name]
        if own.drain_s != applied.node[self.name].drain_s:
            outcome.changed.append(f"node.{self.name}.drain_s is {own.drain_s:g} now")
            applied = evolve(
                applied,
                node={**applied.node, self.name: evolve(applied.node[self.name], drain_s=own.drain_s)},
            )
        if self.assembly.gateway is not None and read.keys is not None:
            section = _apply_to_gateway(self.assembly.gateway, applied.gateway, read, outcome)
            applied = evolve(applied, gateway=section)
        links = self.assembly.links
        if links is not None and links.tls is not None and read.tls is not None:
            links.tls = read.tls  # the contents of its files may have changed
            _report(applied.cluster, new.cluster, "cluster", LINK_FILES, outcome)
            files = {name: getattr(new.cluster, name) for name in LINK_FILES}
            applied = evolve(applied, cluster=evolve(applied.cluster, **files))
        self._applied = evolve(applied, node={**applied.node, **self._add_nodes(new, outcome)})
        parts = [*self._differing(new)]
        if links is not None and links.secret != read.secret:
            parts.append("the cluster's secret")
        if parts:
            names = ", ".join(parts)
            outcome.unchanged.append(
                f"{names}: what is new there takes effect once this node is restarted"
                f" (`restart {self.name}`; node by node, that loses no request)"
            )

    def _add_nodes(self, new: Cluster, outcome: _Outcome) -> dict[str, NodeSection]:
        """Add and return the new nodes in the file, for links in either direction; a launcher starts its own."""
        added, self._nodes = [name for name in new.node if name not in self._nodes], {*new.node}
        if self.assembly.links is None:
            return {}
        for name in added:
            offers = [each for key, engine in new.engines_on(name).items() for each in offers_of(key, engine)]
            address, routes = new.node[name].dial_address, name in new.gateway_nodes
            self.assembly.directory.configure(name, None if address is None else str(address), offers, routes=routes)
            sentence = f"node {name} is known now"
            if self.ask_launcher is not None and new.node[name].host == new.node[self.name].host:
                if holders := self._port_holders(new, name):
                    self._nodes.discard(name)  # the next reload tries it again, as the launcher does
                    outcome.refused.append(
                        f"node {name} is not started: port {new.gateway.port} is held by {', '.join(holders)}, and the"
                        " gateways of a machine share their port all or not at all: drain these first and reload again,"
                        " or restart the launcher"
                    )
                else:
                    outcome.starts.append(name)
                    sentence += ", and the launcher here starts it"
            outcome.changed.append(sentence)
        if added:
            self.assembly.directory.notify()  # wakes the task that dials nodes
        return {name: new.node[name] for name in added}

    def _port_holders(self, new: Cluster, name: str) -> list[str]:
        """Return the running gateways that keep a new node's gateway from its port.

        A gateway that is alone on its machine has the port for itself: with another number of processes, some of the
        nodes are new, and all have to share the port or none.
        """
        old = self._applied
        if name not in new.gateway_nodes or (old.gateway.host, old.gateway.port) != (
            new.gateway.host,
            new.gateway.port,
        ):
            return []
        machine = machine_of(new.node[name].host)
        holders = [each for each in old.gateway_nodes if machine_of(old.node[each].host) == machine]
        if len(holders) > 1 and len(new.port_sharers(name)) > 1:
            return []
        directory = self.assembly.directory
        return [each for each in holders if each == self.name or directory.node(each).link is not None]

    def _differing(self, new: Cluster) -> Iterator[str]:
        """Yield the parts of the file for this node that differ from the ones in force."""
        old = self._applied
        if old.cluster != new.cluster:
            yield "cluster"
        if old.node[self.name] != new.node[self.name]:
            yield f"node.{self.name}"
        # What matters of another node is its address, since it may be this one that dials.
        for name in sorted({*new.node} - {self.name}):
            previous = old.node.get(name)
            if previous is None or previous.dial_address != new.node[name].dial_address:
                yield f"node.{name}"
        engines = self._concerning(old) | self._concerning(new)
        for name in sorted(engines):
            if old.engine.get(name) != new.engine.get(name):
                yield f"engine.{name}"
        serves = self.assembly.gateway is not None
        if (serves or self.name in new.gateway_nodes) and (old.gateway, old.pool) != (new.gateway, new.pool):
            yield "gateway"
        models = {*old.model, *new.model} if serves else {each.model for each in engines.values()}
        for name in sorted(models):
            if old.model.get(name) != new.model.get(name):
                yield f"model.{name}"

    def _concerning(self, cluster: Cluster) -> dict[str, EngineSection]:
        return {name: engine for name, engine in cluster.engine.items() if self.name in engine.nodes}


def _apply_to_gateway(
    gateway: Gateway, section: GatewaySection, read: _FileContents, outcome: _Outcome
) -> GatewaySection:
    """Apply the keys of a gateway that need no restart; return its section with those in force now."""
    new = read.cluster.gateway
    assert read.keys is not None
    names = ["allowed_hosts", "allowed_origins", "keepalive_s"]
    gateway.origins = Origins(frozenset(new.allowed_hosts), frozenset(new.allowed_origins))
    gateway.keepalive_s = new.keepalive_s
    if read.keys.wanted or not gateway.keys.wanted:  # without keys, it would serve nobody
        gateway.keys.sources = read.keys.sources
        names.append("keys")
    if gateway.port.certificate is not None and read.context is not None:  # to turn TLS on or off takes a restart
        gateway.port.certificate, gateway.port.tls = read.cluster.certificate, read.context
        names += ["tls_certificate", "tls_key"]
    _report(section, new, "gateway", names, outcome)
    return evolve(section, **{name: getattr(new, name) for name in names})


def _report(old: object, new: object, path: str, names: Iterable[str], outcome: _Outcome) -> None:
    """Report the keys of a section whose new values are in force now."""
    for name in names:
        if getattr(old, name) != (value := getattr(new, name)):
            shown = ", ".join(value) if isinstance(value, tuple) else value
            if isinstance(shown, float):
                shown = f"{shown:g}"
            outcome.changed.append(f"{path}.{name} is {'nothing' if shown in ('', None) else shown} now")


def _describe_keys(before: Collection[tuple[str, str]], now: Collection[tuple[str, str]]) -> str:
    """Return the sentence about the keys of clients, each of them a name and a digest."""
    new, revoked = len(set(now).difference(before)), len(set(before).difference(now))
    counts = f" ({new} new, {revoked} revoked)" if new or revoked else ""
    return f"keys: {len(now)} are known now{counts}"
