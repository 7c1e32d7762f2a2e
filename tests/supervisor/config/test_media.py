"""`[gateway.media]`: which hosts a pattern means, and contradictions at their lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.config.media import parse_host
from supervisor.engines.kinds import read_cluster
from tests.supervisor.config.test_load import GOOD, mistakes

Written = Callable[[str], Path]

MATCHES = [
    ("a.example", "https", "a.example", 443, True),
    ("a.example.", "https", "a.example", 443, True),
    ("A.Example", "https", "a.example", 443, True),
    ("a.example", "https", "b.a.example", 443, False),
    ("a.example", "https", "a.example", 8443, False),
    ("a.example", "http", "a.example", 443, False),
    ("a.example:8443", "https", "a.example", 8443, True),
    ("a.example:8443", "https", "a.example", 443, False),
    ("*.a.example", "https", "b.a.example", 443, True),
    ("*.a.example", "https", "a.example", 443, False),
    ("*.a.example", "https", ".a.example", 443, False),
    ("*.a.example", "https", "evila.example", 443, False),
    ("*", "https", "anything.example", 443, True),
    ("*", "https", "anything.example", 8080, False),
    ("*:8080", "http", "anything.example", 8080, True),
    ("[2001:DB8::1]:8443", "https", "2001:db8::1", 8443, True),
]


@pytest.mark.parametrize(("text", "scheme", "host", "port", "matches"), MATCHES)
def test_a_pattern_means_hosts_at_a_port(text: str, scheme: str, host: str, port: int, matches: bool) -> None:
    pattern = parse_host(text)
    assert pattern is not None
    assert pattern.matches(scheme, host, port) is matches


@pytest.mark.parametrize(
    "text", ["", "https://a.example", "a.example/x", "a b", "a.example:0", "a:99999", "[::1", "**", "*a", "é"]
)
def test_what_is_no_pattern_is_refused(text: str) -> None:
    assert parse_host(text) is None


MISTAKES = [
    ('allowed_hosts = ["a.example", "https://b.example"]', "allowed_hosts[1]", "no scheme"),
    ('allowed_networks = ["10.0.0.1/8"]', "allowed_networks[0]", "must be like 10.0.0.0/8"),
    ('file_root = "nowhere"', "file_root", "there is no folder"),
    ('tls_authority = "none.pem"', "tls_authority", "there is no file"),
    ("bytes_max = 500_000_000", "bytes_max", "one key's part of fetched_bytes_max (268435456) is 201326592"),
    ("items_max = 193", "items_max", "193 contents count 202375168 bytes at least, and one key's part"),
    ("prepare_s = 1", "prepare_s", "less than fetch_s (15)"),
]


@pytest.mark.parametrize(("line", "key", "reason"), MISTAKES, ids=[key for _, key, _ in MISTAKES])
def test_a_contradiction_is_a_mistake_at_its_key(written: Written, line: str, key: str, reason: str) -> None:
    found = [text for _, text in mistakes(written(f"{GOOD}[gateway.media]\n{line}\n"))]
    assert len(found) == 1
    assert found[0].startswith(f"gateway.media.{key}: ")
    assert reason in found[0]


def test_a_root_and_networks_are_read(written: Written, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    section = (
        '[gateway.media]\nfile_root = "pictures"\nallowed_networks = ["10.0.0.0/8", "::1"]\nallowed_hosts = ["*"]\n'
    )
    media = read_cluster(written(GOOD + section)).gateway.media
    assert (media.file_root, media.allowed_networks, media.items_max) == ("pictures", ("10.0.0.0/8", "::1"), 16)
