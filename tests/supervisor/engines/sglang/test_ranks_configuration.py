"""The configuration of an engine that spans nodes: its mistakes, its hosts' arguments, its place in the trees."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from attrs import evolve

from actors.engines import leftover_memory
from actors.engines.sglang import boot_message
from actors.kit.calls import Address, mailbox
from bench.rig.node import free_ports
from protocol.errors import BadRequest, EngineLost, StartFailed
from protocol.messages.cluster import Leg
from protocol.messages.engine import Done
from protocol.messages.generation import Generate
from protocol.messages.operations import RunRank
from supervisor.cluster import readiness
from supervisor.cluster.directory import Directory
from supervisor.config import placement
from supervisor.config.schema import Cluster
from supervisor.engines.engine_role import with_leg
from supervisor.engines.host.spawn import Descriptors
from supervisor.engines.kind import NodeContext
from supervisor.engines.kinds import read_cluster
from supervisor.engines.sglang import ranks
from supervisor.engines.sglang import spawn as hosts_module
from supervisor.engines.sglang.children import SglangNode, spec_of
from supervisor.engines.sglang.section import BOOTSTRAP_PORTS
from supervisor.engines.work import LocalEngine, request_inbox
from supervisor.launcher import preflight
from supervisor.node import monitoring, preview
from supervisor.processes import run_folder
from supervisor.processes.process import GracePeriods, Process
from supervisor.runtime import Runtime
from supervisor.sockets.descriptor_reserve import DescriptorReserve
from supervisor.supervision.registration import Registration
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL

ROOT = Path(__file__).parents[4]
SPAN = f"""
[cluster]
secret = "secret"
[node.a]
host = "10.0.0.1"
listen = "10.0.0.1:7401"
[node.b]
host = "10.0.0.2"
listen = "10.0.0.2:7401"
[node.c]
host = "10.0.0.3"
listen = "10.0.0.3:7401"
[gateway]
node = "a"
port = 8000
{MODEL}[engine.big]
model = "tiny"
node = "a"
ranks_on = ["b", "c"]
dist_port = 7500
device = "cpu"
tensor_parallel = 3
kv_tokens_max = 4096
"""
DECODE = """
[engine.d]
model = "tiny"
node = "b"
device = "cpu"
leg = "decode"
kv_tokens_max = 4096
"""
PREFILL = f"""
[engine.p]
model = "tiny"
node = "a"
device = "cpu"
leg = "prefill"
bootstrap_port = 7500
kv_tokens_max = 4096
{DECODE}"""
OVER_TWO = f"""
[node.a]
listen = "127.0.0.1:7401"
[node.b]
listen = "127.0.0.1:7402"
[gateway]
node = "a"
{MODEL}[engine.p]
model = "tiny"
node = "a"
ranks_on = ["b"]
dist_port = 7500
device = "cpu"
tensor_parallel = 2
leg = "prefill"
bootstrap_port = 20400
kv_tokens_max = 4096
{DECODE}"""

Read = Callable[..., Cluster]


@pytest.fixture
def read(written: Callable[[str], Path], tmp_path: Path) -> Read:
    (tmp_path / "secret").write_text("a secret that is long enough")

    def read(old: str = "", new: str = "") -> Cluster:
        assert old in SPAN
        return read_cluster(written(SPAN.replace(old, new) if old else SPAN + new))

    return read


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["b", "c"]', '["b", "d"]', "engine.big.ranks_on[1]: there is no node d; there is a, b, c"),
        ('["b", "c"]', '["b", "b"]', "engine.big.ranks_on[1]: node b has a rank of it already"),
        ("dist_port = 7500\n", "", "engine.big.dist_port: is missing: the ranks meet there, on the host of rank 0"),
        ('ranks_on = ["b", "c"]\n', "", "engine.big.dist_port: means nothing without ranks_on"),
        ("tensor_parallel = 3", "tensor_parallel = 6", "an engine on a CPU has one rank a node, which are 3 here"),
        (
            '"cpu"\ntensor_parallel = 3',
            '"cuda"\ntensor_parallel = 4',
            "makes 4 ranks, which 3 nodes cannot share equal",
        ),
        ("7500", "7401", "engine.big.dist_port: is node.a.listen on the same host"),
        ("", PREFILL, "engine.big.dist_port: is engine.p.bootstrap_port on the same host"),
        ("4096\n", "4096\nsettings.node_rank = 1\n", "engine.big.settings.node_rank: is given by node, ranks_on and"),
        ('host = "10.0.0.1"\n', "", "node.a.host: is localhost, where ranks on other hosts do not find its own"),
        ('host = "10.0.0.1"\n', 'host = "0.0.0.0"\n', "node.a.host: is 0.0.0.0, where ranks on other hosts do not"),
        ('device = "cpu"', 'kind = "simulated"', 'engine.big.ranks_on: is for engines of kind "sglang"'),
    ],
)
def test_what_keeps_the_ranks_of_an_engine_from_being_one_is_a_mistake(
    old: str, new: str, message: str, read: Read
) -> None:
    with pytest.raises(StartFailed, match=re.escape(message)):
        read(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('"cpu"\ntensor_parallel = 3', '"cuda"\ntensor_parallel = 12'),
        ('"cpu"\ntensor_parallel = 3', '"cuda"\ntensor_parallel = 8\nsettings.pp_size = 3'),
        ("", PREFILL.replace('node = "a"', 'node = "c"')),  # the same port, of another host
    ],
)
def test_ranks_that_can_be_one_engine(old: str, new: str, read: Read) -> None:
    assert read(old, new).engine["big"].nodes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("host", "meet"),
    [("10.0.0.1", "10.0.0.1:7500"), ("gpu-1.example", "gpu-1.example:7500"), ("fd00::7", "[fd00::7]:7500")],
)
def test_the_ranks_meet_on_the_host_of_rank_0(host: str, meet: str, read: Read) -> None:
    cluster = read('host = "10.0.0.1"', f'host = "{host}"')
    for rank, node in enumerate("abc"):
        spec = spec_of(cluster, "big", rank)
        boot = boot_message.build(spec, "folder")
        assert {key: boot.arguments[key] for key in ("tp_size", "nnodes", "node_rank", "dist_init_addr")} == {
            "tp_size": 3,
            "nnodes": 3,
            "node_rank": rank,
            "dist_init_addr": meet,
        }
        assert boot.environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0"
        assert boot.environment["SGLANG_HOST_IP"] == cluster.node[node].host
    assert spec_of(cluster, "big", 2).name == "big.rank-2"


def test_files_agree_about_an_engine_unless_its_ranks_would_differ(read: Read) -> None:
    keys = ranks.shared_keys(read(), "big")
    assert keys["node.a.host"] == '"10.0.0.1"'
    same = [("4096\n", "4096\nenvironment.NCCL_DEBUG = 'INFO'\n"), ("4096\n", "4096\nsilent_s = 9\n")]
    same += [("4096\n", "4096\nstart_within_s = 9\n"), ('"10.0.0.2"\n', '"10.0.0.9"\n')]
    for old, new in same:
        assert ranks.shared_keys(read(old, new), "big") == keys
    for old, new, key in [
        ("4096", "4097", "kv_tokens_max"),
        ("7500", "7501", "dist_port"),
        ('["b", "c"]', '["c", "b"]', "ranks_on"),
        ('"10.0.0.1"\n', '"10.0.0.9"\n', "node.a.host"),
        ("4096\n", "4096\nsettings.dtype = 'float32'\n", "settings"),
    ]:
        other = ranks.shared_keys(read(old, new), "big")
        assert [name for name in keys if keys[name] != other[name]] == [key]


# In the hosts ----------------------------------------------------------------------------


@pytest.fixture
def hosts(written: Callable[[str], Path], tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Hosts of a prefill over two nodes: how they are started, which all fail, and what a node has for them."""
    boots = []

    async def starts(boot: boot_message.BootMessage, descriptors: Descriptors) -> Process:
        await trio.lowlevel.checkpoint()
        boots.append(boot)
        raise StartFailed("nothing starts here")

    cluster = read_cluster(written(OVER_TWO.replace("20400", str(free_ports(1)[0]))))
    with run_folder.run_folder(tmp_path, leftover_memory.remove) as folder:
        own = {
            "folder": folder,
            "logs": tmp_path,
            "grace": GracePeriods(),
            "metrics": Metrics(),
            "reserve": DescriptorReserve(),
        }
        runtime = cast("Runtime", SimpleNamespace(now=lambda: 5.0, environment={}, **own))

        def node(name: str) -> SglangNode:
            node = SglangNode(NodeContext(cluster, name, runtime, Directory(name)))
            node.starters |= dict.fromkeys(cluster.engine, starts)
            return node

        yield SimpleNamespace(cluster=cluster, node=node, boots=boots)


async def test_a_follower_rank_of_a_prefill_starts_with_the_port_of_the_request(
    hosts: SimpleNamespace, nursery: trio.Nursery
) -> None:
    first = hosts.cluster.engine["p"].bootstrap_port
    address: Address[RunRank, Done, Done]
    address, inbox = mailbox(1)
    child = hosts.node("b").follower("p", inbox)
    await nursery.start(partial(child.run, *child.args))
    agreed = ranks.shared_keys(hosts.cluster, "p")
    last = first + BOOTSTRAP_PORTS - 1
    for port, refused in ((first, EngineLost), (last, EngineLost), (last + 1, BadRequest)):
        with pytest.raises(refused):
            async with address.ask(RunRank(agreed, port), 1) as answer:
                await answer.result()
    ports = [boot.arguments["disaggregation_bootstrap_port"] for boot in hosts.boots]
    assert ports == [first, last]
    assert {boot.arguments["node_rank"] for boot in hosts.boots} == {1}


async def test_each_life_of_an_engine_boots_with_the_role_that_it_has_then(hosts: SimpleNamespace) -> None:
    (port,) = free_ports(1)
    section = evolve(hosts.cluster.engine["d"], bootstrap_port=port)
    _, inbox = request_inbox(1)
    local = LocalEngine("d", section, Registration(), inbox, lambda: None, lambda: None)
    child = hosts.node("b").engine(local).child
    for leg in (Leg.DECODE, Leg.PREFILL, Leg.BOTH):
        local.role.section = with_leg(section, leg)
        with pytest.raises(StartFailed):
            await child.run(*child.args, task_status=trio.TASK_STATUS_IGNORED)
    modes = [boot.arguments.get("disaggregation_mode") for boot in hosts.boots]
    ports = [boot.arguments.get("disaggregation_bootstrap_port") for boot in hosts.boots]
    assert modes == ["decode", "prefill", None]
    assert ports[0] is ports[2] is None
    assert ports[1] in range(port, port + BOOTSTRAP_PORTS)


# In the trees ----------------------------------------------------------------------------


def children(cluster: Cluster, node: str) -> list[str]:
    """Return a node's children that are there because of engines, models, links or the gateway; it may have more."""
    names = (child.name for child in built_assembly(cluster, node)[0].tree.children)
    return [name for name in names if OF_ENGINES_AND_MODELS.match(name)]


OF_ENGINES_AND_MODELS = re.compile("(gateway|links|big|bog)$|(zygote|grammars|router|processor)")
SERVED = ("router-tiny", "processor-tiny")


def test_the_first_node_has_the_engine_and_every_other_one_its_rank(read: Read) -> None:
    cluster = read()
    assert children(cluster, "a") == ["gateway", "links", "zygote", "big", "grammars-big", *SERVED]
    assert children(cluster, "b") == children(cluster, "c") == ["links", "zygote", "big"]
    for node in "abc":
        links = built_assembly(cluster, node)[0].links
        assert links is not None
        serves = links.services
        assert (("big", RunRank) in serves, ("big", Generate) in serves) == (node != "a", node == "a")
        assert ("", RunRank) not in serves  # what has no name can be asked by operators


def test_a_nodes_ranks_of_other_engines_are_there_before_its_own_engines_wait_for_theirs(read: Read) -> None:
    second = SPAN[SPAN.index("[engine.big]") :].replace("big", "bog").replace("7500", "7600")
    second = second.replace('"a"', '"b"').replace('["b", "c"]', '["a", "c"]')
    cluster = read("", second)
    assert children(cluster, "a")[:5] == ["gateway", "links", "zygote", "bog", "big"]
    assert children(cluster, "b") == ["links", "zygote", "big", "bog", "grammars-bog"]


def test_a_check_prints_the_group(read: Read) -> None:
    cluster = read()
    first, other = (" ".join(preview.describe_node(cluster, node, {}).split()) for node in "ab")
    assert "tiny on cpu, over nodes a, b, c, which meet at 10.0.0.1:7500" in first
    assert "SGLang's rank 0, in a process of its own" in first
    assert "rank 1 of tiny on cpu, over nodes a, b, c, which meet at 10.0.0.1:7500" in other


def test_the_status_of_an_engine_names_the_node_that_it_waits_for(read: Read) -> None:
    cluster = read()
    assembly, _ = built_assembly(cluster, "a")
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine big is starting"
    assembly.directory.local["big"].engine.set_blocked_by("there is no link to node b")
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine big is starting: there is no link to node b"
    assert monitoring.unready(cluster, assembly.directory) == "engine big is starting: there is no link to node b"


def test_the_port_where_ranks_meet_must_be_free_on_the_host_of_rank_0(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(preflight, "check_port", lambda host, port, key, **_: asked.append((port, key)))
    monkeypatch.setattr(preflight, "available_bytes", lambda: None)
    cluster = read()
    preflight.check_can_start(cluster, "a")
    assert (7500, "engine.big.dist_port") in asked
    asked.clear()
    preflight.check_can_start(cluster, "b")
    assert (7500, "engine.big.dist_port") not in asked


def test_the_example_is_two_nodes_of_this_host() -> None:
    cluster = read_cluster(ROOT / "examples" / "spanning.toml")
    assert placement.select_nodes(cluster, None) == ("first", "second")
    assert cluster.engine["tiny-0"].nodes == ("first", "second")


def test_an_engine_with_variables_of_its_own_is_forked_from_a_zygote_that_has_them(read: Read) -> None:
    """Torch reads OMP_NUM_THREADS when it is imported, and so do others."""
    plain = '[engine.q]\nmodel = "tiny"\nnode = "b"\ndevice = "cpu"\nkv_tokens_max = 4096\n'
    own = plain.replace("engine.q", "engine.r") + '[engine.r.environment]\nOMP_NUM_THREADS = "3"\n'
    assembly, _ = built_assembly(read("", plain + own), "b")
    members = {child.name: child for child in assembly.tree.children}
    assert [name for name in members if name.startswith("zygote")] == ["zygote", "zygote-r"]
    assert "zygote" in (members["q"].needs or ())
    assert "zygote-r" in (members["r"].needs or ())
    zygotes: dict[str, Any] = {name: members[name] for name in ("zygote", "zygote-r")}
    given = {name: zygote.children[0].args[-1] for name, zygote in zygotes.items()}
    variables = {name: hosts_module.host_environment({}, "cpu", own) for name, own in given.items()}
    assert variables["zygote"]["OMP_NUM_THREADS"] == "1"
    assert variables["zygote-r"]["OMP_NUM_THREADS"] == "3"
