"""The file of keys: the limits of each key, and the mistakes that are found in it."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.strict.mistakes import Mistakes
from supervisor.config import keyfile
from supervisor.config.keyfile import KeySection
from tests.rig.keys import sha

SECRET = "sk-quetzalcoatl-0123456789"


def test_a_file_sets_the_limits_of_each_key() -> None:
    text: dict[str, Any] = {
        "sha256": sha("a"),
        "tenant": "acme",
        "rate_per_s": 0.5,
        "burst": 4,
        "concurrency_max": 2,
        "connections_max": 3,
        "priority": -7,
        "admin": True,
    }
    assert keyfile.read({"key": {"alice": text}}) == {"alice": KeySection(**text)}
    assert keyfile.read({}) == {}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "key.a.sha256: is missing"),
        ({"sha256": SECRET}, "key.a.sha256: must be the 64 hexadecimal digits that `hash-key` prints"),
        ({"sha256": sha("a").upper()}, "key.a.sha256: must be"),
        ({"sha256": sha("a"), "secret": SECRET}, "key.a.secret: is not a key here"),
        ({"sha256": sha("a"), "rate_per_s": 0}, "key.a.rate_per_s: must be at least 1e-06"),
        ({"sha256": sha("a"), "rate_per_s": "5"}, "key.a.rate_per_s: expected a number"),
        ({"sha256": sha("a"), "burst": 5}, "key.a.burst: means nothing without rate_per_s"),
        ({"sha256": sha("a"), "concurrency_max": 0}, "key.a.concurrency_max: must be at least 1"),
        ({"sha256": sha("a"), "priority": 10**9}, "key.a.priority: must be at least"),
        ({"sha256": sha("a"), "admin": "false"}, "key.a.admin: expected true or false"),
        ({"sha256": sha("b")}, "key.a.sha256: is the secret of b too"),
        ({"sha256": sha("a"), "grammars": ["cfg"]}, "key.a.grammars"),
        ({"sha256": sha("a"), "tenant": "a/b"}, "key.a.tenant: must be empty, or 1 to 64 letters"),
        ({"sha256": sha("a"), "tenant": "x" * 65}, "key.a.tenant: must be"),
    ],
)
def test_a_mistake_in_the_file_is_named_without_its_secret(section: dict[str, Any], message: str) -> None:
    with pytest.raises(Mistakes) as caught:
        keyfile.read({"key": {"b": {"sha256": sha("b")}, "a": section}})
    assert message in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "-a", "é", "x" * 65])
def test_a_name_of_other_characters_or_too_long_is_a_mistake(name: str) -> None:
    with pytest.raises(Mistakes, match="must be 1 to 64 letters"):
        keyfile.read({"key": {name: {"sha256": sha("a")}}})


def test_a_file_has_at_most_1024_keys() -> None:
    def some(count: int) -> dict[Any, Any]:
        return {"key": {f"k{n}": {"sha256": sha(str(n))} for n in range(count)}}

    assert len(keyfile.read(some(keyfile.KEYS_MAX))) == keyfile.KEYS_MAX
    with pytest.raises(Mistakes, match="at most 1024 items"):
        keyfile.read(some(keyfile.KEYS_MAX + 1))
