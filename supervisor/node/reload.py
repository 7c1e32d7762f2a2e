"""Reload a node's file while it runs: apply what can be applied at once, and report what takes a restart.

The file is read and checked as a whole, with all that it names, before any of it is applied: a file with a mistake
changes nothing. Values are compared with those in force, key by key, so a reload reports each difference in a sentence,
and says of every key whether it holds now or from the next start on. Only one reload runs at a time.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from functools import partial

import trio
from attrs import define, evolve, field, frozen

from actors.routing.policies import POLICIES
from protocol.cluster import Reloaded
from protocol.errors import InternalError, StartFailed
from supervisor.cluster import link_credentials
from supervisor.config.load import Cluster, Loaded, NodeSection
from supervisor.engines.children import offer
from supervisor.files.reading import FileReader
from supervisor.gateway import client_keys
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import Keys
from supervisor.gateway.origins import Origins
from supervisor.links.tls import LinkTls
from supervisor.node import file_checks
from supervisor.node.assembly import Assembly
from supervisor.node.file_changes import RESTART, Change, changes, describe_applied, describe_unapplied, value_at
from supervisor.node.router_child import RELOADABLE, limits
from supervisor.threads.file_threads import FileThreads

log = logging.getLogger(__name__)

SILENCES = ("heartbeat_s", "silent_s", "stalled_s")
GREETED = ("handshake_s", "handshakes_max", "tls_names")
LINKED = ("streams_max", *SILENCES, *GREETED, "tell_s", "announcements_max", "retry_min_s", "retry_max_s")
TLS_FILES = ("tls_certificate", "tls_key", "tls_authority")
AT_THE_GATE = ("requests_max", "admit_s", "waiting_max")
ASKING = ("first_token_s", "total_s")


class _NotInFile(StartFailed):
    """The file is valid, but no longer contains this node."""


@frozen
class _Read:
    """The file as it is now, and all files that it names: everything is read before anything is applied."""

    cluster: Cluster
    differences: tuple[Change, ...]  # from the file at the start
    secret: bytes = field(repr=False)
    tls: LinkTls | None
    keys: Keys | None = None  # of clients, where this node has the gateway
    context: ssl.SSLContext | None = None  # of its certificate


@define(eq=False)
class _Outcome:
    """The outcome of a reload: what changed, what takes a restart, what is wrong, which nodes the launcher starts."""

    changed: list[str] = field(factory=list)
    unchanged: list[str] = field(factory=list)
    refused: list[str] = field(factory=list)
    starts: list[str] = field(factory=list)


@define(eq=False)
class _Next:
    """The next reload, shared by all who ask before it begins."""

    wanted: trio.Event = field(factory=trio.Event)
    done: trio.Event = field(factory=trio.Event)
    result: Reloaded | None = None  # None: a bug ended it


@define(eq=False)
class Reloader:
    """Reloads the file of one node; `cluster` is the file as it was when the node started."""

    name: str
    loaded: Loaded
    assembly: Assembly
    environment: Mapping[str, str] = field(repr=False)
    set_drain_s: Callable[[float], None]
    ask_launcher: Callable[[], None] | None = None  # to start nodes that are new in the file
    reads: FileReader = field(factory=FileThreads)
    _applied: dict[tuple[str, ...], object] = field(factory=dict)  # values applied since the start, by key
    _new: set[str] = field(factory=set)  # nodes that were added to the file, on this host, since the start
    _placed: set[str] = field(init=False)  # the nodes of this host, by the latest version of the file
    _next: _Next = field(factory=_Next)

    def __attrs_post_init__(self) -> None:
        self._placed = self._placed_by(self.loaded.cluster)

    def ask(self) -> None:
        """Ask for a reload of the file, the keys and the certificate, without waiting for it."""
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

    async def run(self) -> None:
        """Reload whenever that is asked for, one reload after the other, until cancelled.

        This is a task of the node itself: a reload that has begun is completed although its caller has left.
        """
        while True:
            await self._next.wanted.wait()
            request, self._next = self._next, _Next()
            try:
                request.result = await self._reload()
            except Exception:  # a node must not end because of what is in a file
                log.exception("a bug ended a reload")
            finally:
                request.done.set()

    async def _reload(self) -> Reloaded:
        outcome = _Outcome()
        try:
            read = await self.reads(self._read)
            self._apply_all(read, outcome)
            outcome.starts += self._to_start(read.cluster)
        except _NotInFile as error:
            outcome.unchanged.append(f"the file changes nothing: {error}")
        except StartFailed as error:
            log.error("the file changes nothing", extra={"reason": str(error)})  # noqa: TRY400  # no traceback
            outcome.refused.append(f"the file changes nothing: {error}")
        if (gateway := self.assembly.gateway or self.assembly.monitoring) is not None:
            refused = await gateway.reload(self.reads)
            outcome.refused += refused
            if gateway.keys.wanted and not any(sentence.startswith("the keys") for sentence in refused):
                outcome.changed.append(f"keys: {gateway.keys.count} are known now")
        if self.ask_launcher is not None:
            self.ask_launcher()
        if not outcome.refused:
            log.info("read the file anew", extra={"changed": outcome.changed, "unchanged": outcome.unchanged})
        return Reloaded(*map(tuple, (outcome.changed, outcome.unchanged, outcome.starts, outcome.refused)))

    def _read(self) -> _Read:
        """Read the file and all that it names; raises `StartFailed` if this node could not start with it."""
        examine = partial(file_checks.mistakes, environment=self.environment)
        new = self.loaded.again(examine).cluster
        if self.name not in new.node:
            raise _NotInFile(f"there is no node {self.name} in {self.loaded.file} any more; drain it if it is to go")
        keys, context = None, None
        if self.assembly.gateway is not None and new.gateway.node == self.name:
            keys = client_keys.client_keys(new, self.environment)
            context = None if new.certificate is None else new.certificate.context()
        secret, tls = link_credentials.cluster_secret(new, self.environment), link_credentials.link_tls(new)
        link_credentials.check_certificate_names(new, self.name, tls)
        return _Read(new, tuple(changes(self.loaded.cluster, new)), secret, tls, keys, context)

    def _apply_all(self, read: _Read, outcome: _Outcome) -> None:
        differences = {change.path: change for change in read.differences}
        for path in self._applied:  # a value that is again as it was at the start is a change as well
            differences.setdefault(path, Change(path, None, value_at(self.loaded.cluster, path)))
        unapplied: dict[str, list[str]] = {}  # keys of engines and models; their values may be secrets
        for difference in differences.values():
            change = evolve(difference, old=self._applied.get(difference.path, difference.old))
            if change.old == change.new or (applied := self._apply(change, read)) is None:
                continue  # the latter concerns another node
            if applied:
                self._note(change, read.cluster, outcome)
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

    def _to_start(self, new: Cluster) -> list[str]:
        """Return the nodes that the launcher of this one may start now: those new on its host that nobody reaches.

        Others that are away may have been drained: the launcher starts those no more.
        """
        before, self._placed = self._placed, self._placed_by(new)
        self._new = self._placed & (self._new | self._placed - before)
        if self.ask_launcher is None:
            return []
        directory = self.assembly.directory
        return [name for name in new.node if name in self._new and directory.node(name).link is None]

    def _placed_by(self, cluster: Cluster) -> set[str]:
        host = cluster.node[self.name].host
        return {name for name, node in cluster.node.items() if node.host == host}

    def _note(self, change: Change, new: Cluster, outcome: _Outcome) -> None:
        """Note what has been applied, and whether the launcher that started this node now starts a new one."""
        self._applied[change.path] = change.new
        outcome.changed.append(describe_applied(change))
        if isinstance(change.new, NodeSection) and change.old is None and self.ask_launcher is not None:
            name = change.path[1]
            if new.node[name].host == new.node[self.name].host:
                outcome.changed[-1] += ", and the launcher here starts it"

    # What each key takes -----------------------------------------------------------------

    def _apply(self, change: Change, read: _Read) -> bool | None:
        """Apply one change: whether that could be done, None if this node has nothing to do with it."""
        new = read.cluster
        match change.path:
            case ("gateway", *keys):
                return self._gateway(tuple(keys), read)
            case ("cluster", key):
                return self._cluster(key, read)
            case ("node", name, *keys):
                return self._node(name, tuple(keys), change, new)
            case ("model", name, *keys):
                return self._model(name, tuple(keys), new)
            case ("engine", name, *_):
                both = (self.loaded.cluster.engine.get(name), new.engine.get(name))
                return False if any(each is not None and self.name in each.nodes for each in both) else None
        return False

    def _gateway(self, keys: tuple[str, ...], read: _Read) -> bool | None:
        gateway, section = self.assembly.gateway, read.cluster.gateway
        if gateway is None:
            return False if keys == ("node",) and section.node == self.name else None
        match keys:
            case (key,) if key in AT_THE_GATE:
                # The processors' own places are as many as there were at the start.
                most = min(section.requests_max, self.loaded.cluster.gateway.requests_max)
                gateway.gate.change(most, section.admit_s, section.waiting_max)
                if key == "requests_max":
                    self._applied["gateway", key] = most  # whatever the file says: its next change is judged by this
                return key != "requests_max" or most == section.requests_max
            case (key,) if key in ASKING:
                setattr(gateway.runner, key, getattr(section, key))
            case ("prompt_tokens_max",):
                self.assembly.reloadable.prompt_tokens_max = section.prompt_tokens_max
            case ("allowed_hosts" | "allowed_origins" | "grammars",):
                gateway.origins = Origins(frozenset(section.allowed_hosts), frozenset(section.allowed_origins))
                gateway.grammars = frozenset(section.grammars)
            case ("keys",) if read.keys is not None:  # else the gateway is another node's now, by the file
                gateway.keys.sources = read.keys.sources
            case ("tls_certificate" | "tls_key",):
                return _certificate(gateway, read)
            case ("limits", key) if key != "send_buffer_bytes":  # that one is the listening socket's
                gateway.limits = evolve(gateway.limits, **{key: getattr(section.limits, key)})
            case _:
                return False
        return True

    def _cluster(self, key: str, read: _Read) -> bool | None:
        links = self.assembly.links
        if links is None:
            return None
        if key in LINKED and (key != "tls_names" or links.tls is not None):
            links.section = evolve(links.section, **{key: getattr(read.cluster.cluster, key)})
            return True
        return key in TLS_FILES and links.tls is not None and read.tls is not None

    def _node(self, name: str, keys: tuple[str, ...], change: Change, new: Cluster) -> bool | None:
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
        if isinstance(change.old, NodeSection) and change.old.listen == section.listen:  # known since an earlier reload
            return None
        if section.listen is None and change.old is not None:  # where it listened is never forgotten
            return False
        offers = [offer(key, each) for key, each in new.engines_on(name).items()]
        address = section.dial_address
        assembly.directory.configure(name, None if address is None else str(address), offers)
        assembly.directory.notify()  # the task that dials nodes looks there
        return True

    def _model(self, name: str, keys: tuple[str, ...], new: Cluster) -> bool | None:
        routing, section = self.assembly.reloadable.routings.get(name), new.model.get(name)
        if self.assembly.gateway is None:
            ours = (*self.loaded.cluster.engines_on(self.name).values(), *new.engines_on(self.name).values())
            return (
                False
                if any(each.model == name for each in ours) and keys[:1] not in {(k,) for k in RELOADABLE}
                else None
            )
        if routing is None or section is None or not keys or keys[0] not in RELOADABLE:
            return False
        routing.policy = POLICIES[section.policy]
        routing.prefill_tokens_min = section.prefill_tokens_min
        routing.limits = limits(section)
        return True


def _certificate(gateway: Gateway, read: _Read) -> bool:
    """Show other files to clients that come from now on; to begin or to end to speak TLS takes a restart."""
    if gateway.certificate is None or read.context is None:
        return False
    gateway.certificate, gateway.tls = read.cluster.certificate, read.context
    return True
