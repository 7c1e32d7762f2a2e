"""The commands of the servers: what they start, and that all of them have the same engine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from attrs import evolve
from tokenizers import Tokenizer

from actors.engines.sglang import boot_message
from bench.peers import cpu_sglang
from bench.peers.install import LISTS, environment_names
from bench.peers.mock_model import VOCABULARY_SIZE, mock_model
from bench.peers.peer import Peer, Setup
from bench.peers.table import OURS, RIVALS
from bench.rig.node import free_port
from supervisor.engines.kinds import read_cluster
from supervisor.engines.sglang.children import spec_of
from supervisor.engines.simulated.section import SimulatedSection

EXPECTED = {"dynamo": ["frontend", "worker-0"], "dynamo-mocker": ["frontend", "mocker"]}
PROCESSES = {**EXPECTED, "sglang": ["server"], "smg": ["server-0", "gateway"]}
each_rival = pytest.mark.parametrize("peer", RIVALS.values(), ids=RIVALS)
each_of_ours = pytest.mark.parametrize("peer", OURS.values(), ids=OURS)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(folder=tmp_path, port=free_port(), slots=48, environments=tmp_path / "environments")


def flags(words: tuple[str, ...]) -> dict[str, str]:
    """Return the values of a command's options by their names."""
    return {word: value for word, value in pairwise(words) if word.startswith("--")}


@each_rival
def test_a_peer_starts_its_processes_in_environments_of_its_own(peer: Peer, setup: Setup) -> None:
    commands = peer.commands(setup)
    assert [command.name for command in commands] == PROCESSES[peer.name]
    assert {Path(command.words[0]).parents[1].name for command in commands} == set(peer.environments)
    assert any(str(setup.port) in command.words for command in commands), "clients must find it"


@each_rival
def test_each_environment_of_a_peer_has_a_list_of_pinned_packages(peer: Peer) -> None:
    assert set(peer.environments) <= set(environment_names())
    for name in peer.environments:
        lines = (LISTS / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith(("#", "-r "))]
        assert pins, name
        assert all("==" in pin for pin in pins), name


@each_of_ours
def test_ours_is_described_by_a_file_without_mistakes(peer: Peer, setup: Setup) -> None:
    command = peer.commands(setup)[0]
    cluster = read_cluster(Path(command.words[-1]))
    assert cluster.gateway.port == setup.port
    engine = cluster.engine["tiny-0"]
    assert (engine.slots, engine.kind) == (setup.slots, peer.engine)
    if isinstance(engine, SimulatedSection):
        assert engine.simulated.costs.step_s(100, 32, 4000) == setup.step_s


@each_of_ours
def test_ours_can_have_as_many_slots_as_there_are_streams_to_measure(peer: Peer, setup: Setup) -> None:
    file = Path(peer.commands(evolve(setup, slots=4096))[0].words[-1])
    cluster = read_cluster(file)
    assert cluster.cluster.streams_max >= cluster.engine["tiny-0"].slots == 4096


@each_of_ours
def test_ours_has_a_node_for_each_engine_where_they_are_apart(peer: Peer, setup: Setup) -> None:
    command = peer.commands(evolve(setup, workers=3))[0]
    cluster = read_cluster(Path(command.words[-1]))
    nodes = {engine.node for engine in cluster.engine.values()}
    assert len(cluster.engine) == 3
    assert len(nodes) == (3 if command.name == "launcher" else 1)


def test_two_gateway_processes_share_the_port(setup: Setup) -> None:
    file = Path(OURS["espalier-gateways"].commands(setup)[0].words[-1])
    cluster = read_cluster(file)
    assert (cluster.processes, cluster.gateway.port) == ({"front": ("front-0", "front-1")}, setup.port)


@pytest.mark.parametrize("name", ["espalier", "espalier-nodes"])
def test_our_engine_has_the_arguments_and_the_environment_of_a_peers(name: str, setup: Setup) -> None:
    file = Path(OURS[name].commands(setup)[0].words[-1])
    ours = boot_message.build(spec_of(read_cluster(file), "tiny-0"), "folder")
    words = cpu_sglang.flags(setup)
    theirs = flags(words)
    for option, value in theirs.items():
        argument = option.removeprefix("--").replace("-", "_")
        if argument == "served_model_name" or value.startswith("--"):
            continue
        assert str(ours.arguments[argument]) == value, argument
    for switch in (word for word in words if word.startswith("--") and word not in theirs):
        assert ours.arguments[switch.removeprefix("--").replace("-", "_")] is True
    # Ours in its own process, and one of ours for grammars.
    own = {"incremental_streaming_output", "host", "tp_size", "constrained_json_disable_any_whitespace"}
    given = {word.removeprefix("--").replace("-", "_") for word in words}
    assert set(ours.arguments) - own <= given
    shared = cpu_sglang.VARIABLES.keys() & ours.environment.keys()
    assert {key: ours.environment[key] for key in shared} == {key: cpu_sglang.VARIABLES[key] for key in shared}
    assert cpu_sglang.VARIABLES.keys() - shared == {"PYTHONPATH"}


def test_each_token_that_the_mocker_draws_is_text(tmp_path: Path) -> None:
    folder = mock_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    texts = {tokenizer.decode([token]) for token in range(1000, 2000)}
    assert len(texts) == 1000
    assert all(text.startswith(" ") for text in texts)


def test_the_mocker_is_as_slow_as_our_simulated_engine(setup: Setup) -> None:
    words = RIVALS["dynamo-mocker"].commands(evolve(setup, step_s=0.003))[1].words
    assert flags(words)["--speedup-ratio"] == "2.0"
    assert flags(words)["--max-num-seqs"] == "48"
