"""The secret of a cluster: configured, or made by a launcher for the nodes that it starts."""

from __future__ import annotations

import pytest

from supervisor.cluster.link_credentials import SECRET, START_SECRET, cluster_secret, start_secret
from supervisor.config.load import Misconfigured
from supervisor.engines.kinds import read_cluster
from supervisor.node.start import SECRETS
from tests.rig.cluster_files import MODEL
from tests.supervisor.config.test_load import Written

MADE = "0123456789abcdef" * 4
NODES = """\
[node.front]
listen = "127.0.0.1:7400"
[node.back]
listen = "127.0.0.1:7401"
[gateway]
node = "front"
[engine.one]
node = "back"
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""
FILE = MODEL + NODES
CONFIGURED = "a-secret-that-nobody-guesses"


def test_nodes_of_one_launcher_have_the_secret_that_it_made(written: Written) -> None:
    cluster = read_cluster(written(FILE))
    made = start_secret(cluster, {}, MADE)
    assert made == {START_SECRET: MADE}
    assert cluster_secret(cluster, made) == MADE.encode()
    assert cluster_secret(cluster, {}) == b"", "a node that is started alone has none"


def test_a_configured_secret_goes_before_one_that_a_launcher_made(written: Written) -> None:
    cluster = read_cluster(written(FILE))
    environment = {SECRET: CONFIGURED}
    assert start_secret(cluster, environment, MADE) == {}
    assert cluster_secret(cluster, environment | {START_SECRET: MADE}) == CONFIGURED.encode()
    file = written(FILE + '[cluster]\nsecret = "secret"\n')
    (file.parent / "secret").write_text(CONFIGURED)
    assert start_secret(read_cluster(file), {}, MADE) == {}
    assert cluster_secret(read_cluster(file), {START_SECRET: MADE}) == CONFIGURED.encode()


def test_a_launcher_makes_no_secret_where_nodes_of_others_are_to_link(written: Written) -> None:
    joining = read_cluster(written(FILE + '[cluster]\njoin = ["127.0.0.1:7500"]\n'))
    assert start_secret(joining, {}, MADE) == {}


def test_a_secret_that_a_launcher_made_is_none_for_other_machines(written: Written) -> None:
    cluster = read_cluster(written(FILE.replace("127.0.0.1:7401", "0.0.0.0:7401")))
    with pytest.raises(Misconfigured, match="need a secret"):
        start_secret(cluster, {}, MADE)
    with pytest.raises(Misconfigured, match="need a secret"):
        cluster_secret(cluster, {START_SECRET: MADE})


def test_no_process_of_an_engine_has_the_secret_of_a_launcher() -> None:
    assert {SECRET, START_SECRET} <= SECRETS
