"""The servers of sessions: sizes, routing by prefix, and engines without pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.engines.simulated.spec import SimulatedSpec
from bench.peers.dynamo import MOCKER
from bench.peers.peer import Setup
from bench.rig.node import free_port
from bench.turns.servers import is_engine, servers
from supervisor.engines.kinds import read_cluster
from supervisor.engines.simulated.section import SimulatedSection

SERVERS = servers("tiny")
OURS = [name for name in SERVERS if name.startswith("espalier")]
THEIRS = [name for name in SERVERS if name.startswith("dynamo")]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(folder=tmp_path, port=free_port(), workers=2, kv_tokens_max=2_000_000, step_s=0.001)


def engines(name: str, setup: Setup) -> list[SimulatedSection]:
    cluster = read_cluster(Path(SERVERS[name].commands(setup)[0].words[-1]))
    assert cluster.model["tiny"].policy == "kv"
    sections = [engine for engine in cluster.engine.values() if isinstance(engine, SimulatedSection)]
    assert len(sections) == setup.workers
    return sections


@pytest.mark.parametrize("name", OURS)
def test_our_engines_take_long_prompts_in_one_step(name: str, setup: Setup) -> None:
    for engine in engines(name, setup):
        assert engine.kv_tokens_max == 2_000_000
        assert engine.context_max is not None
        assert min(engine.context_max, engine.prefill_chunk or 0) > 262_144
        assert engine.simulated.costs.step_s(200_000, 4, 200_000) == setup.step_s


def test_engines_without_pages_have_no_cache_to_publish(setup: Setup) -> None:
    assert SimulatedSpec().prefix_cache
    assert [engine.simulated.prefix_cache for engine in engines("espalier-pageless", setup)] == [False, False]
    assert [engine.simulated.prefix_cache for engine in engines("espalier", setup)] == [True, True]


@pytest.mark.parametrize("name", THEIRS)
def test_dynamo_routes_by_prefix_to_mockers_with_the_same_memory(name: str, setup: Setup) -> None:
    front, mocker = SERVERS[name].commands(setup)
    assert front.words[front.words.index("--router-mode") + 1] == "kv"
    assert mocker.words[mocker.words.index("--num-gpu-blocks-override") + 1] == str(2_000_000 // 16)
    assert mocker.words[mocker.words.index("--num-workers") + 1] == "2"
    assert MOCKER in mocker.words[0]


def test_dynamo_is_compared_with_and_without_its_caches(setup: Setup) -> None:
    variables = {name: SERVERS[name].commands(setup)[0].variables for name in THEIRS}
    assert [name for name in THEIRS if "DYN_TOKENIZER_CACHE_BYTES" in variables[name]] == ["dynamo-uncached"]
    fast = [name for name in THEIRS if "fastokens" in SERVERS[name].commands(setup)[0].words]
    assert fast == ["dynamo-fastokens"]


@pytest.mark.parametrize(("name", "caches"), [("smg", True), ("smg-uncached", False)])
def test_smg_encodes_for_its_workers_with_and_without_its_cache(name: str, caches: bool, setup: Setup) -> None:
    one, other, gateway = SERVERS[name].commands(setup)
    ports = [command.words[2] for command in (one, other)]
    assert gateway.words[-2:] == tuple(f"grpc://127.0.0.1:{port}" for port in ports)
    assert gateway.words[gateway.words.index("--tokenizer-path") + 1] == one.words[3]
    assert ("--tokenizer-cache-enable-l1" in gateway.words) is caches


@pytest.mark.parametrize(
    ("group", "expected"),
    [("node front", False), ("frontend", False), ("node", False), ("node worker-1", True), ("mocker", True)],
)
def test_a_worker_is_an_engine_and_a_gateway_is_none(group: str, expected: bool) -> None:
    assert is_engine(group) is expected
