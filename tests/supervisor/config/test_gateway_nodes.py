"""`[gateway] nodes` and `processes` become nodes, and what they cannot become is a mistake at its line."""

from __future__ import annotations

import pytest

from supervisor.config import placement
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from tests.supervisor.config.test_load import GOOD, Written, mistakes

NODES = """
[node.main]
listen = "127.0.0.1:7401"
[node.a]
{a}
[node.b]
{b}
[gateway]
{gateway}
"""


def text(gateway: str, a: str = "", b: str = "") -> str:
    return GOOD + NODES.format(gateway=gateway, a=a, b=b)


@pytest.fixture
def processes(written: Written) -> Cluster:
    """A cluster whose gateway on node a runs as three processes."""
    listens = 'listen = "127.0.0.1:7410"\nmetrics = "127.0.0.1:7510"\ndrain_s = 7'
    return read_cluster(written(text('node = "a"\nprocesses = 3', listens, 'listen = "127.0.0.1:7402"')))


def test_a_process_of_a_gateway_is_a_node_with_ports_of_its_own(processes: Cluster) -> None:
    assert list(processes.node) == ["main", "a-0", "a-1", "a-2", "b"]
    assert processes.gateway_nodes == ("a-0", "a-1", "a-2")
    assert processes.processes == {"a": ("a-0", "a-1", "a-2")}
    nodes = [processes.node[name] for name in processes.gateway_nodes]
    assert [str(node.listen) for node in nodes] == [f"127.0.0.1:{port}" for port in (7410, 7411, 7412)]
    assert [str(node.metrics) for node in nodes] == [f"127.0.0.1:{port}" for port in (7510, 7511, 7512)]
    assert {node.drain_s for node in nodes} == {7}


def test_all_processes_of_a_gateway_are_selected_by_the_name_of_its_node(processes: Cluster) -> None:
    assert placement.select_nodes(processes, "a") == ("a-0", "a-1", "a-2")
    assert placement.select_nodes(processes, "a-1") == ("a-1",)


def test_a_node_is_linked_to_every_gateway(processes: Cluster) -> None:
    assert processes.required_peers("main") == {"a-0", "a-1", "a-2"}


def test_gateways_of_one_machine_share_their_port(written: Written) -> None:
    cluster = read_cluster(written(text('nodes = ["a", "b", "far"]') + '[node.far]\nhost = "10.0.0.9"\n'))
    assert cluster.gateway_nodes == ("a", "b", "far")
    assert (cluster.port_sharers("a"), cluster.port_sharers("far")) == (("a", "b"), ("far",))
    assert [host for key, host, _ in cluster.ports() if key == "gateway.port"] == ["localhost", "10.0.0.9"]


def test_several_nodes_may_each_run_as_several_processes(written: Written) -> None:
    cluster = read_cluster(written(text('nodes = ["a", "b"]\nprocesses = 2')))
    assert cluster.gateway_nodes == ("a-0", "a-1", "b-0", "b-1")
    assert cluster.port_sharers("b-1") == cluster.gateway_nodes


@pytest.mark.parametrize("gateway", ["", 'node = "main"', 'nodes = ["main"]', "processes = 1"])
def test_one_gateway_is_one_node(written: Written, gateway: str) -> None:
    cluster = read_cluster(written(f"{GOOD}[gateway]\n{gateway}\n"))
    assert (list(cluster.node), cluster.gateway_nodes, cluster.processes) == (["main"], ("main",), {})


LISTENS = 'listen = "127.0.0.1:7410"'
MISTAKES = [
    ("processes = 2", "gateway.processes: is 2, and engine tiny-0 is on node main: give it a node without"),
    ('nodes = ["a", "a"]', "gateway.nodes[1]: names node a again"),
    ('nodes = ["a", "c"]', "gateway.nodes[1]: there is no node c; there is main, a, b"),
    ("nodes = []", "gateway.nodes: must not be empty"),
    ('node = "a"\nnodes = ["a"]', "gateway.nodes: stands beside gateway.node"),
    ('nodes = ["a", "b"]\nport = 0', "gateway.port: is 0, a free port for each process, but several share it"),
    ('node = "a"\nprocesses = 65', "gateway.processes: must be at least 1 and at most 64, got 65"),
]


@pytest.mark.parametrize(("gateway", "mistake"), MISTAKES, ids=[mistake[:40] for _, mistake in MISTAKES])
def test_what_cannot_be_several_gateways_is_a_mistake(written: Written, gateway: str, mistake: str) -> None:
    (reported,) = mistakes(written(text(gateway, LISTENS, 'listen = "127.0.0.1:7420"')))
    assert reported[1].startswith(mistake)


def test_the_ports_and_names_of_processes_collide_with_no_others(written: Written) -> None:
    other = 'listen = "127.0.0.1:7420"\n[node.a-1]\nlisten = "127.0.0.1:7450"'
    reported = [sentence for _, sentence in mistakes(written(text('node = "a"\nprocesses = 2', LISTENS, other)))]
    assert reported == [
        "gateway.processes: is 2, which makes a node a-1 of node a, and there is one already",
    ]
    other = 'listen = "127.0.0.1:7411"'
    assert [sentence for _, sentence in mistakes(written(text('node = "a"\nprocesses = 2', LISTENS, other)))] == [
        "node.b.listen: is where node a-1 listens"
    ]


@pytest.mark.parametrize("key", ["listen", "metrics"])
def test_the_ports_of_all_processes_exist(written: Written, key: str) -> None:
    reported = mistakes(written(text('node = "a"\nprocesses = 4', f'{key} = "127.0.0.1:65533"', "listen = '[::1]:1'")))
    assert [sentence for _, sentence in reported] == [
        f"node.a.{key}: needs 4 ports from 65533 on, one for each process"
    ]


def test_a_name_that_is_too_long_with_a_number_is_a_mistake(written: Written) -> None:
    name = "n" * 31
    both = f'[node.{name}]\n[node.main]\nlisten = "127.0.0.1:7401"\n[gateway]\nnode = "{name}"\nprocesses = 2\n'
    ((_, sentence),) = mistakes(written(GOOD + both))
    assert sentence.startswith("gateway.processes: adds a number to the name of node nnn")


def test_gateways_without_engines_need_not_listen_but_all_others_do(written: Written) -> None:
    read_cluster(written(text('nodes = ["a", "b"]')))
    assert mistakes(written(text('node = "a"')))[0][1].startswith("node.b.listen: is missing: a does not listen either")
    engine = GOOD.split("[engine")[1].replace(".tiny-0]", '.tiny-1]\nnode = "a"')
    assert [sentence for _, sentence in mistakes(written(text('nodes = ["a", "b"]') + f"[engine{engine}"))] == [
        "node.b.listen: is missing: a does not listen either, so they cannot meet"
    ]
