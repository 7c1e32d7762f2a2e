"""A launcher runs the nodes of a file that are placed on its host, or the one that is named."""

from __future__ import annotations

import socket

import pytest

from protocol.errors import StartFailed
from supervisor.config import placement
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from tests.supervisor.config.test_load import GOOD, Written

SEVERAL = (
    GOOD
    + """
[gateway]
node = "a"
port = 0
[node.main]
listen = "127.0.0.1:{port}"
[node.a]
[node.far]
host = "192.0.2.7"
listen = "192.0.2.7:7402"
[node.b]
host = "{host}"
listen = "127.0.0.1:7403"
"""
)


def several(written: Written, host: str = "localhost", port: int = 7401) -> Cluster:
    return read_cluster(written(SEVERAL.format(host=host, port=port)))


def test_the_only_node_of_a_file_runs_on_any_host(written: Written) -> None:
    for text in (GOOD, GOOD + '[node.main]\nhost = "192.0.2.7"\n'):
        cluster = read_cluster(written(text))
        assert placement.select_nodes(cluster, None) == placement.select_nodes(cluster, "main") == ("main",)
    with pytest.raises(StartFailed, match="there is no node other; there is main"):
        placement.select_nodes(cluster, "other")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1", socket.gethostname()])
def test_of_several_nodes_those_on_this_host_run(host: str, written: Written) -> None:
    cluster = several(written, host)
    assert placement.select_nodes(cluster, None) == ("main", "a", "b")
    assert placement.select_nodes(cluster, "far") == ("far",)  # `--node` is always obeyed


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid", "0.0.0.0", "", "a" * 300])
def test_another_host_or_no_host_is_not_this_one(host: str) -> None:
    assert not placement.is_local_host(host)


def test_a_file_without_a_node_for_this_host_is_refused_with_the_hosts_of_its_nodes(written: Written) -> None:
    text = GOOD + '[node.main]\nhost = "192.0.2.7"\nlisten = "192.0.2.7:1"\n[node.b]\nhost = "192.0.2.8"\n'
    with pytest.raises(
        StartFailed, match=r"no node on this host, .*: main on 192\.0\.2\.7, b on 192\.0\.2\.8; or name"
    ):
        placement.select_nodes(read_cluster(written(text)), None)
