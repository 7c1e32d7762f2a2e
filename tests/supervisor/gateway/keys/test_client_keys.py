"""A gateway that other hosts can reach starts only with client keys."""

from __future__ import annotations

import pytest

from protocol.errors import StartFailed
from supervisor.config.load import Misconfigured
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.keys import client_keys
from supervisor.node import preview
from tests.supervisor.config.test_load import GOOD, Written

DIGEST = "[key.alice]\nsha256 = '" + "a" * 64 + "'\n"


def gateway(written: Written, lines: str, keys: str = DIGEST) -> Cluster:
    path = written(f"{GOOD}[gateway]\n{lines}\n")
    (path.parent / "keys.toml").write_text(keys)
    return read_cluster(path)


def test_a_gateway_on_loopback_needs_no_keys_and_allows_the_host_names_of_loopback(written: Written) -> None:
    cluster = gateway(written, "")
    assert not client_keys.client_keys(cluster, {}).wanted
    assert set(cluster.gateway.allowed_hosts) == {"127.0.0.1", "::1", "localhost"}
    assert (cluster.keys, cluster.certificate) == (None, None)


@pytest.mark.parametrize("environment", [{}, {"ESPALIER_ADMIN_KEY": "the-admins"}])
def test_a_gateway_beyond_loopback_does_not_start_without_client_keys(
    environment: dict[str, str], written: Written
) -> None:
    cluster = gateway(written, 'host = "10.0.0.7"')
    with pytest.raises(StartFailed, match=r"10\.0\.0\.7 is not loopback, so clients need keys: .*ESPALIER_API_KEYS"):
        client_keys.client_keys(cluster, environment)
    with pytest.raises(StartFailed, match="so clients need keys"):
        preview.describe_node(cluster, "main", environment)


@pytest.mark.parametrize(
    ("lines", "environment"),
    [('host = "10.0.0.7"\nkeys = "keys.toml"', {}), ('host = "10.0.0.7"', {"ESPALIER_API_KEYS": "alice=abc"})],
)
def test_a_gateway_beyond_loopback_with_keys_allows_its_address_as_host(
    lines: str, environment: dict[str, str], written: Written
) -> None:
    cluster = gateway(written, lines)
    assert client_keys.client_keys(cluster, environment).names(admin=False) == ["alice"]
    assert "10.0.0.7" in cluster.gateway.allowed_hosts


@pytest.mark.parametrize("key", ["allowed_hosts", "allowed_origins"])
def test_any_host_or_origin_is_allowed_only_where_keys_are_required(key: str, written: Written) -> None:
    with pytest.raises(Misconfigured, match="opens this server to every web page without keys") as caught:
        client_keys.client_keys(gateway(written, f'{key} = ["*"]'), {})
    assert caught.value.path == f"gateway.{key}"
    assert client_keys.client_keys(gateway(written, f'{key} = ["*"]\nkeys = "keys.toml"'), {}).wanted


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("", "there is no key in .*keys.toml, so nobody could use this server; to revoke the last"),
        ("[key.a]\n", "key.a.sha256: is missing"),
    ],
)
def test_an_unusable_file_of_keys_is_refused_in_one_sentence(keys: str, message: str, written: Written) -> None:
    with pytest.raises(StartFailed, match=message) as caught:
        client_keys.client_keys(gateway(written, 'keys = "keys.toml"', keys), {})
    assert "\n" not in str(caught.value)
