"""Keys of clients called Alice and Bob, for tests of the gateway."""

from __future__ import annotations

import hashlib

from supervisor.gateway.keys.key_sources import KEYS, KeySources
from supervisor.gateway.keys.keys import Keys
from tests.rig.gateway import SECRET, Rig


def as_(name: str) -> dict[str, str]:
    """Return the header with the key of a client."""
    return {"authorization": f"Bearer {name}-{SECRET}"}


def require_keys(rig: Rig) -> None:
    """Make a running gateway want a key of Alice or Bob."""
    rig.gateway.keys = Keys(KeySources(None, {KEYS: f"alice=alice-{SECRET},bob=bob-{SECRET}"}))
    rig.gateway.keys.load()


def sha(secret: str) -> str:
    """Return the hash of a secret, as it stands in a file of keys."""
    return hashlib.sha256(secret.encode()).hexdigest()
