"""API keys: hashed at rest, compared in constant time, and counted against limits of their own.

A secret is never stored and never logged: what a client presents is hashed at once, and only its SHA-256 is compared.
It is compared with every key, so that the time of a refusal reveals nothing about how close a guess was. Keys can be
replaced while requests run: a removed key ends no running request, and admits no new one. Once keys are wanted they
stay wanted until the process ends: removing the last key must lock everybody out, and not let everybody in.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import trio
from attrs import define, field, frozen

from protocol.errors import BadRequest, ConcurrencyLimited, Forbidden, RateLimited, Unauthorized
from supervisor.config.keyfile import PRIORITY_MAX, KeySection
from supervisor.gateway.keys.key_sources import ADMIN, SECRET_BYTES_MAX, KeySources
from supervisor.gateway.keys.token_bucket import TokenBucket

log = logging.getLogger(__name__)

WANTED = "this server wants a key; send it as `Authorization: Bearer KEY`"
ANONYMOUS = KeySection(sha256="0" * 64, priority=None)
"""The limits of callers without a key. Its digest is that of no known secret, and nothing is compared with it."""

Header = tuple[bytes, bytes]
Headers = Sequence[Header]


@define(eq=False)
class ClientKey:
    """One key, and what is open in its name: generations, connections, and its rate limit."""

    name: str = "-"
    section: KeySection = ANONYMOUS
    gateways: int = 1  # that divide its rate
    revoked: bool = False
    running: int = 0  # generations
    connections: int = 0
    _bucket: TokenBucket | None = None

    @contextmanager
    def generating(self, weight: int = 1, param: str | None = None) -> Iterator[None]:
        """Count `weight` generations as running while the body runs.

        Raises `Unauthorized`, `ConcurrencyLimited`, or `BadRequest` with `param` for a weight that could never fit.
        """
        self.raise_if_revoked()
        limit = self.section.concurrency_max
        if limit is not None and weight > limit:
            raise BadRequest(
                f"{weight} answers are asked for at once, and the key {self.name!r} may have {limit} (concurrency_max)",
                param=param,
            )
        if limit is not None and self.running + weight > limit:
            raise ConcurrencyLimited(
                f"the key {self.name!r} has {self.running} answers running, and asks for {weight} more;"
                f" it may have {limit}"
            )
        self.running += weight
        try:
            yield
        finally:
            self.running -= weight

    @property
    def is_anonymous(self) -> bool:
        """Whether this is the owner of requests that need no key."""
        return self.section is ANONYMOUS

    def raise_if_revoked(self) -> None:
        """Raise `Unauthorized` if the key has been revoked since it was presented."""
        if self.revoked and self.is_anonymous:
            raise Unauthorized(WANTED)
        if self.revoked:
            raise Unauthorized(f"the key {self.name!r} is not valid any more")

    def add_connection(self, default_max: int, part: int) -> None:
        """Count one connection more; raises `ConcurrencyLimited`. Its end is counted by the caller.

        The limit is the key's own or the default one, and at most one key's `part` of all connections.
        """
        limit = min(self.section.connections_max or default_max, part)
        if self.connections >= limit:
            raise ConcurrencyLimited(f"the key {self.name!r} has {self.connections} connections, as many as it may")
        self.connections += 1

    def change(self, section: KeySection) -> None:
        """Set other limits; open connections and requests stay open, and the rest of the rate limit is kept."""
        self.section = section
        if (rate := self.rate_per_s) is None:
            self._bucket = None
        elif self._bucket is not None:
            self._bucket.change(rate, self.burst_max, trio.current_time())

    @property
    def rate_per_s(self) -> float | None:
        """The rate of its requests here: the same share of the whole at each gateway."""
        return None if self.section.rate_per_s is None else self.section.rate_per_s / self.gateways

    @property
    def burst_max(self) -> int:
        """The requests that it may make at once here."""
        return math.ceil(self.section.burst_max / self.gateways)

    def charge(self) -> None:
        """Charge the rate limit for one request, successful or not; raises `Unauthorized` or `RateLimited`."""
        self.raise_if_revoked()
        if (rate := self.rate_per_s) is None:
            return
        now = trio.current_time()
        if self._bucket is None:
            self._bucket = TokenBucket.full(rate, self.burst_max, now)
        if (wait_s := self._bucket.take(now)) > 0:
            share = f" here, at one of {self.gateways} gateways" if self.gateways > 1 else ""
            raise RateLimited(
                f"the key {self.name!r} may ask {rate:g} times a second{share}; the next time is in {wait_s:.3g} s",
                retry_after_s=max(1, math.ceil(wait_s)),
            )

    def clamp_priority(self, requested: int | None) -> int:
        """Return the priority of a request: the key's own is its default, and the highest that a request may name.

        With a key whose priority is None a request may name any, within `PRIORITY_MAX`.
        """
        own = self.section.priority
        if requested is None:
            return own or 0
        return max(-PRIORITY_MAX, min(requested, PRIORITY_MAX if own is None else own))


@frozen
class KeyStatistics:
    """Counts of what is open in the name of one key."""

    running: int  # generations
    connections: int


@define(eq=False)
class Keys:
    """All keys of a gateway; where none are wanted, everybody may do everything."""

    sources: KeySources = KeySources()
    anonymous: ClientKey = field(factory=ClientKey)  # the owner of requests that need no key
    gateways: int = 1  # that divide the rates of keys
    _keys: dict[str, ClientKey] = field(factory=dict)
    _clients: int = 0  # keys other than admin keys
    _wanted: bool = False
    _admin_wanted: bool = False

    def load(self) -> None:
        """Read the keys again; raises `StartFailed`, and then nothing has changed."""
        self.replace(self.sources.read())

    def replace(self, sections: Mapping[str, KeySection]) -> None:
        """Use these keys from now on; one with the same name and secret keeps its counts and its rate limit."""
        old, self._keys = self._keys, {}
        for name, section in sections.items():
            key = old.get(name)
            if key is not None and key.section.sha256 == section.sha256:
                key.change(section)
                self._keys[name] = old.pop(name)
            else:
                self._keys[name] = ClientKey(name, section, self.gateways)
        for key in old.values():
            key.revoked = True
        self._wanted = self._wanted or self.sources.wanted
        self._clients = sum(not section.admin for section in sections.values())
        self.anonymous.revoked = self._wanted
        self._admin_wanted = self._admin_wanted or self._wanted or bool(self.names(admin=True))

    @property
    def count(self) -> int:
        """The number of keys."""
        return len(self._keys)

    @property
    def several(self) -> bool:
        """Whether there are several keys of clients, which need protection from each other."""
        return self._clients > 1

    @property
    def digests(self) -> frozenset[tuple[str, str]]:
        """The name of each key and the digest of its secret; a key with another secret is another key."""
        return frozenset((name, key.section.sha256) for name, key in self._keys.items())

    @property
    def wanted(self) -> bool:
        """Whether a client needs a key."""
        return self._wanted

    def statistics(self) -> dict[str, KeyStatistics]:
        """Return what is open in the name of each key."""
        return {name: KeyStatistics(key.running, key.connections) for name, key in self._keys.items()}

    def names(self, *, admin: bool) -> list[str]:
        """Return the names of the admin keys, or of all others."""
        return sorted(name for name, key in self._keys.items() if key.section.admin is admin)

    def tenants(self) -> dict[str, list[str]]:
        """Return the names of the keys of each tenant, that of the default one last."""
        tenants: dict[str, list[str]] = {}
        for name, key in sorted(self._keys.items()):
            tenants.setdefault(key.section.tenant, []).append(name)
        return dict(sorted(tenants.items(), key=lambda item: (not item[0], item[0])))

    def grammars(self) -> dict[str, tuple[str, ...] | None]:
        """Return the kinds of grammars that each key may use, None for a key without such a setting."""
        return {name: key.section.grammars for name, key in sorted(self._keys.items())}

    def find(self, headers: Headers, *, admin: bool = False) -> ClientKey:
        """Return the key that a request presents; raises `Unauthorized`, or `Forbidden` if it must be an admin key."""
        if not (self._admin_wanted if admin else self._wanted):
            # Clients may send any key here, and an operator the admin key.
            return self.presented(headers) or self.anonymous
        secret = presented_secret(headers)
        if secret is None:
            raise Unauthorized(WANTED)
        key = self._match(secret)
        if key is None:
            raise Unauthorized("this key is not known here")
        if admin and not key.section.admin:
            if not self.names(admin=True):
                raise Forbidden(f"nobody may do this: there is no admin key; set {ADMIN}, or admin = true for a key")
            raise Forbidden(f"the key {key.name!r} may not do this; it takes an admin key")
        return key

    def administers(self, key: ClientKey | None) -> bool:
        """Whether a caller may see the cluster from inside: with an admin key, or where administration needs none."""
        return not self._admin_wanted if key is None or key.is_anonymous else key.section.admin

    def presented(self, headers: Headers) -> ClientKey | None:
        """Return the key that a request presents although it may need none; None without a known one."""
        secret = presented_secret(headers) if self._keys else None
        return None if secret is None else self._match(secret)

    def _match(self, secret: bytes) -> ClientKey | None:
        """Return the key of a secret; compares with every key, without stopping at the first that matches."""
        digest = hashlib.sha256(secret).hexdigest()
        matching = None
        for key in self._keys.values():
            if hmac.compare_digest(digest, key.section.sha256):
                matching = key
        return matching


def presented_secret(headers: Headers) -> bytes | None:
    """Return the secret of a request: its bearer token, or else the value of `api-key` or `x-api-key`."""
    by_name = dict(headers)
    scheme, _, secret = by_name.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() != b"bearer":
        secret = by_name.get(b"api-key") or by_name.get(b"x-api-key") or b""
    secret = secret.strip()
    return secret if 0 < len(secret) <= SECRET_BYTES_MAX else None
