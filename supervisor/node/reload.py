"""Read a node's file anew while it runs: what it takes over at once, and what takes a restart."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

import attrs
import trio
from attrs import define, evolve, field, frozen

from actors.routing.policies import POLICIES
from protocol.cluster import Reloaded
from protocol.errors import InternalError, StartFailed
from supervisor.cluster import link_credentials
from supervisor.config.load import Cluster, NodeSection
from supervisor.engines.children import offer
from supervisor.engines.kinds import read_cluster
from supervisor.files.reading import FileReader
from supervisor.gateway import client_keys
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys import Keys
from supervisor.gateway.origins import Origins
from supervisor.links.tls import LinkTls
from supervisor.node import file_checks
from supervisor.node.assembly import Assembly
from supervisor.node.router_child import RELOADABLE, limits
from supervisor.threads.file_threads import FileThreads

log = logging.getLogger(__name__)

SILENCES = ("heartbeat_s", "silent_s", "stalled_s")
GREETED = ("handshake_s", "handshakes_max", "tls_names")
LINKED = ("streams_max", *SILENCES, *GREETED, "tell_s", "announcements_max", "retry_min_s", "retry_max_s")
TLS_FILES = ("tls_certificate", "tls_key", "tls_authority")
AT_THE_GATE = ("requests_max", "admit_s", "waiting_max")
ASKING = ("first_token_s", "total_s")
RESTART = "until this node is started again"


@frozen
class Change:
    """One key of the file whose value is another one now; None stands for one that is not there."""

    path: tuple[str, ...]
    old: object
    new: object

    def __str__(self) -> str:
        return ".".join(self.path)


def changes(old: object, new: object, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield what is different between two values of the same kind, key by key."""
    if attrs.has(type(old)) and type(old) is type(new):
        for each in attrs.fields(cast("type[attrs.AttrsInstance]", type(old))):
            if each.init:
                yield from changes(getattr(old, each.name), getattr(new, each.name), (*path, each.name))
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from changes(old.get(key), new.get(key), (*path, str(key)))
    elif old != new:
        yield Change(path, old, new)


class _NotInFile(StartFailed):
    """The file is right, and has this node no more."""


@frozen
class _Read:
    """A file as it is now, with what it names, so that nothing is left to be read when it is applied."""

    cluster: Cluster
    differs: tuple[Change, ...]  # from how it was at the start
    secret: bytes = field(repr=False)
    tls: LinkTls | None
    keys: Keys | None = None  # of clients, where this node has the gateway
    context: ssl.SSLContext | None = None  # of its certificate


@define(eq=False)
class _Told:
    """What comes of a file: what was changed, what stays as it was, what is wrong, which nodes a launcher starts."""

    changed: list[str] = field(factory=list)
    stays: list[str] = field(factory=list)
    refused: list[str] = field(factory=list)
    starts: list[str] = field(factory=list)


@define(eq=False)
class _Next:
    """The reload that comes next, for all who ask before it begins."""

    wanted: trio.Event = field(factory=trio.Event)
    over: trio.Event = field(factory=trio.Event)
    told: Reloaded | None = None


@define(eq=False)
class Reloader:
    """What one node needs to read its file anew; `cluster` is the file as it was when the node started."""

    name: str
    cluster: Cluster
    assembly: Assembly
    environment: Mapping[str, str] = field(repr=False)
    set_drain_s: Callable[[float], None]
    ask_launcher: Callable[[], None] | None = None  # to start what is new in the file
    reads: FileReader = field(factory=FileThreads)
    _applied: dict[tuple[str, ...], object] = field(factory=dict)  # and what has been changed since
    _new: set[str] = field(factory=set)  # nodes that came into the file, and to this host, while this one runs
    _placed: set[str] = field(init=False)  # the nodes of this host, by the file as it was read last
    _next: _Next = field(factory=_Next)

    def __attrs_post_init__(self) -> None:
        self._placed = self._placed_by(self.cluster)

    def ask(self) -> None:
        """Have file, keys and certificate read anew a moment later."""
        self._next.wanted.set()

    async def reload(self) -> Reloaded:
        """Read file, keys and certificate anew, apply what can be, and return a sentence for each difference.

        A file that cannot be read or does not answer, or in which something is wrong, changes nothing but the keys.
        Raises `InternalError` if a bug ended it.
        """
        one = self._next
        self.ask()
        await one.over.wait()
        if one.told is None:
            raise InternalError("the node made a mistake; its log has the details")
        return one.told

    async def run(self) -> None:
        """Read anew whenever that is asked for, until cancelled: one after the other, and all who wait share the next.

        It is a task of the node's own: it ends what it has begun though whoever asked has left, and with the node.
        """
        while True:
            await self._next.wanted.wait()
            one, self._next = self._next, _Next()
            try:
                one.told = await self._reload()
            except Exception:  # a node must not fall because of what stands in a file
                log.exception("a bug ended a reload")
            finally:
                one.over.set()

    async def _reload(self) -> Reloaded:
        told = _Told()
        try:
            read = await self.reads(self._read)
            self._apply_all(read, told)
            told.starts += self._to_start(read.cluster)
        except _NotInFile as error:
            told.stays.append(f"the file changes nothing: {error}")
        except StartFailed as error:
            log.error("the file changes nothing", extra={"reason": str(error)})  # noqa: TRY400  # no traceback
            told.refused.append(f"the file changes nothing: {error}")
        if (door := self.assembly.gateway or self.assembly.monitoring) is not None:
            refused = await door.reload(self.reads)
            told.refused += refused
            if door.keys.wanted and not any(each.startswith("the keys") for each in refused):
                told.changed.append(f"keys: {door.keys.count} are known now")
        if self.ask_launcher is not None:
            self.ask_launcher()
        if not told.refused:
            log.info("read the file anew", extra={"changed": told.changed, "not_changed": told.stays})
        return Reloaded(*map(tuple, (told.changed, told.stays, told.starts, told.refused)))

    def _read(self) -> _Read:
        """Return the file as it is now; raises `StartFailed` if this node could not start with it."""
        examine = partial(file_checks.mistakes, environment=self.environment)
        new = read_cluster(self.cluster.file, self.cluster.joined, examine)
        if self.name not in new.node:
            raise _NotInFile(f"there is no node {self.name} in {new.file} any more; drain it if it is to go")
        keys, context = None, None
        if self.assembly.gateway is not None and new.gateway.node == self.name:
            keys = client_keys.client_keys(new, self.environment)
            context = None if new.certificate is None else new.certificate.context()
        secret, tls = link_credentials.cluster_secret(new, self.environment), link_credentials.link_tls(new)
        link_credentials.check_certificate_names(new, self.name, tls)
        return _Read(new, tuple(changes(self.cluster, new)), secret, tls, keys, context)

    def _apply_all(self, read: _Read, told: _Told) -> None:
        found = {change.path: change for change in read.differs}
        for path in self._applied:  # what stands in the file as at the start again is a change too
            found.setdefault(path, Change(path, None, _at(self.cluster, path)))
        left: dict[str, list[str]] = {}  # of an engine or a model, what takes a restart; its values may be secrets
        for each in found.values():
            change = evolve(each, old=self._applied.get(each.path, each.old))
            if change.old == change.new or (applied := self._apply(change, read)) is None:
                continue  # the second is another node's
            if applied:
                self._note(change, read.cluster, told)
            elif change.path[0] in {"engine", "model"}:
                left.setdefault(" ".join(change.path[:2]), []).append(".".join(change.path[2:]))
            else:
                told.stays.append(_stays(change))
        for which, keys in left.items():
            said = ", ".join(filter(None, keys))
            told.stays.append(
                f"{which} stays as it is {RESTART}{f', though the file has another {said}' if said else ''}"
            )
        if (links := self.assembly.links) is not None:
            if links.secret != read.secret:
                told.stays.append(f"the cluster's secret stays as it was {RESTART}")
            if links.tls is not None and read.tls is not None:
                links.tls = read.tls  # its files may have others in them

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

    def _note(self, change: Change, new: Cluster, told: _Told) -> None:
        """Note what has been applied, and whether the launcher that started this node now starts a new one."""
        self._applied[change.path] = change.new
        told.changed.append(_now(change))
        if isinstance(change.new, NodeSection) and change.old is None and self.ask_launcher is not None:
            name = change.path[1]
            if new.node[name].host == new.node[self.name].host:
                told.changed[-1] += ", and the launcher here starts it"

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
                both = (self.cluster.engine.get(name), new.engine.get(name))
                return False if any(each is not None and self.name in each.nodes for each in both) else None
        return False

    def _gateway(self, keys: tuple[str, ...], read: _Read) -> bool | None:
        door, section = self.assembly.gateway, read.cluster.gateway
        if door is None:
            return False if keys == ("node",) and section.node == self.name else None
        match keys:
            case (key,) if key in AT_THE_GATE:
                # The processors' own places are as many as there were at the start.
                most = min(section.requests_max, self.cluster.gateway.requests_max)
                door.gate.change(most, section.admit_s, section.waiting_max)
                if key == "requests_max":
                    self._applied["gateway", key] = most  # whatever the file says: its next change is judged by this
                return key != "requests_max" or most == section.requests_max
            case (key,) if key in ASKING:
                setattr(door.runner, key, getattr(section, key))
            case ("prompt_tokens_max",):
                self.assembly.reloadable.prompt_tokens_max = section.prompt_tokens_max
            case ("allowed_hosts" | "allowed_origins" | "grammars",):
                door.origins = Origins(frozenset(section.allowed_hosts), frozenset(section.allowed_origins))
                door.grammars = frozenset(section.grammars)
            case ("keys",) if read.keys is not None:  # else the gateway is another node's now, by the file
                door.keys.sources = read.keys.sources
            case ("tls_certificate" | "tls_key",):
                return _certificate(door, read)
            case ("limits", key) if key != "send_buffer_bytes":  # that one is the listening socket's
                door.limits = evolve(door.limits, **{key: getattr(section.limits, key)})
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
        assembly.directory.configure(name, section.dial_address, offers)
        assembly.directory.notify()  # whoever dials looks there
        return True

    def _model(self, name: str, keys: tuple[str, ...], new: Cluster) -> bool | None:
        routing, section = self.assembly.reloadable.routings.get(name), new.model.get(name)
        if self.assembly.gateway is None:
            ours = (*self.cluster.engines_on(self.name).values(), *new.engines_on(self.name).values())
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


def _certificate(door: Gateway, read: _Read) -> bool:
    """Show other files to clients that come from now on; to begin or to end to speak TLS takes a restart."""
    if door.certificate is None or read.context is None:
        return False
    door.certificate, door.tls = read.cluster.certificate, read.context
    return True


def _at(cluster: Cluster, path: tuple[str, ...]) -> object:
    """Return what stands at a path, None if nothing does."""
    value: object = cluster
    for key in path:
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
    return value


def _now(change: Change) -> str:
    if isinstance(change.old, NodeSection) and isinstance(change.new, NodeSection):
        change = Change((*change.path, "listen"), change.old.listen, change.new.listen)
    if isinstance(change.new, NodeSection):
        return f"node {change.path[1]} is known now"
    return f"{change} is {_said(change.new)} now, and was {_said(change.old)}"


def _stays(change: Change) -> str:
    if isinstance(change.old, NodeSection) and isinstance(change.new, NodeSection):
        change = Change((*change.path, "listen"), change.old.listen, change.new.listen)
    if isinstance(change.old, NodeSection):
        return f"node {change.path[1]} stays known as it was {RESTART}; drain it if it is to go"
    if isinstance(change.new, NodeSection):
        return f"node {change.path[1]} stays unknown {RESTART}: it was started without links"
    if change.path == ("gateway", "requests_max"):
        return f"{change} can only be lowered and raised again, to what it was at the start, {RESTART}"
    return f"{change} stays {_said(change.old)} {RESTART}, though the file says {_said(change.new)}"


def _said(value: object) -> str:
    if isinstance(value, tuple | frozenset):
        return ", ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
