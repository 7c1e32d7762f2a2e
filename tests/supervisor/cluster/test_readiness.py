"""What a node says of an engine that fails, and when a node whose engines never came up ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.spec import SimulatedSpec
from protocol.errors import EngineDied, StartFailed
from protocol.messages.cluster import Leg, NodeState, Offer
from supervisor.cluster import readiness
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.node import monitoring
from supervisor.node.assembly import Assembly
from supervisor.supervision.events import ChildEvent, ChildEventKind
from supervisor.supervision.registration import Registration
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL, engine
from tests.rig.links import idle_link
from tests.rig.nodes import Engine

ONE = f"""
[node.main]
{{listen}}
[gateway]
node = "main"
port = 0
{MODEL}"""
GONE = EngineDied("the GPU is gone")
Assemblies = Callable[..., tuple[Cluster, Assembly]]


@pytest.fixture
def assemblies(written: Callable[[str], Path]) -> Assemblies:
    def make(*engines: tuple[str, str], node: str = "main", listen: str = "") -> tuple[Cluster, Assembly]:
        cluster = read_cluster(written(ONE.format(listen=listen) + "".join(engine(*given) for given in engines)))
        return cluster, built_assembly(cluster, node)[0]

    return make


def fails(assembly: Assembly, name: str, wait_s: float = 8.0, error: EngineDied = GONE) -> None:
    path, now = f"main/{name}/engine", trio.current_time()
    assembly.on_event(ChildEvent(path, ChildEventKind.FAILED, now, error))
    assembly.on_event(ChildEvent(path, ChildEventKind.RESTARTING, now, wait_s=wait_s))


async def test_readiness_has_the_failure_and_when_the_engine_starts_again(
    assemblies: Assemblies, autojump_clock: MockClock
) -> None:
    cluster, assembly = assemblies(("a", "main"))
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine a is starting"
    fails(assembly, "a")
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine a failed: the GPU is gone; next try in 8 s"
    assert monitoring.unready(cluster, assembly.directory) == "engine a failed: the GPU is gone; next try in 8 s"
    await trio.sleep(5)
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine a failed: the GPU is gone; next try in 3 s"
    await trio.sleep(3)
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine a failed: the GPU is gone; next try now"


async def test_the_reason_is_the_engines_own_although_its_siblings_fail_first(assemblies: Assemblies) -> None:
    _, assembly = assemblies(("a", "main"))
    now = trio.current_time()
    for kind, error in ((ChildEventKind.FAILED, EngineDied("the engine is lost")), (ChildEventKind.RESTARTING, None)):
        assembly.on_event(ChildEvent("main/a/decode", kind, now, error, 8.0))
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine a failed: the engine is lost; next try in 8 s"
    assembly.on_event(ChildEvent("main/a/engine", ChildEventKind.FAILED, now, GONE))
    assert readiness.unready(assembly.directory, ["tiny"]) == "engine a failed: the GPU is gone; next try in 8 s"


async def test_a_node_announces_why_an_engine_is_down(assemblies: Assemblies) -> None:
    _, assembly = assemblies(("a", "main"))
    fails(assembly, "a")
    [offer] = assembly.directory.state().offers
    assert (offer.up, offer.why) == (False, "failed: the GPU is gone")
    _, other = assemblies(("b", "main"))
    other.directory.merge_state("far", NodeState((evolve(offer, model="big"),)))
    assert readiness.unready(other.directory, ["big"]) == "engine a failed: the GPU is gone"


async def test_readiness_and_status_say_which_legs_cannot_meet_and_why(assemblies: Assemblies) -> None:
    _, assembly = assemblies(("a", "main"))
    directory, link = assembly.directory, idle_link()
    legs = [
        Offer(name, "big", leg, 4, True, SimulatedSpec(leg=leg, page_size=size).info)
        for name, leg, size in (("p", Leg.PREFILL, 32), ("d", Leg.DECODE, 16), ("p16", Leg.PREFILL, 16))
    ]
    why = "can meet no decode: its page_size is 32, and that of far/d is 16"
    directory.linked("far", link)
    directory.merge_state("far", NodeState((*legs[:2],)))
    assert readiness.unready(directory, ["big"]) == f"engine far/p {why}"
    assert readiness.never_ready(directory, ["big"]) == f"engine far/p {why}"
    directory.merge_state("far", NodeState((*legs,)))
    assert readiness.unready(directory, ["big"]) is None
    assert readiness.unpaired(directory) == {"far/p": why}


async def test_a_node_ends_once_all_its_engines_have_failed_their_first_start(assemblies: Assemblies) -> None:
    _, assembly = assemblies(("a", "main"), ("b", "main"))
    fails(assembly, "a")
    failures = [assembly.start_failure]
    for error in (EngineDied("there is no model"), GONE):
        fails(assembly, "b", error=error)
        failures.append(assembly.start_failure)
    assert failures == [None, "the GPU is gone; there is no model", "the GPU is gone"]


async def test_an_engine_that_has_been_up_keeps_its_node_alive(assemblies: Assemblies) -> None:
    _, assembly = assemblies(("a", "main"), ("b", "main"))
    with assembly.engines["a"].publish(Engine()):
        pass
    fails(assembly, "a")
    fails(assembly, "b")
    assert assembly.start_failure is None


async def test_a_gateway_of_other_nodes_engines_does_not_end_with_its_own(assemblies: Assemblies) -> None:
    _, assembly = assemblies(("a", "main"), listen='listen = "127.0.0.1:7401"')
    fails(assembly, "a")
    assert assembly.start_failure is None


async def test_an_engine_fails_with_a_zygote_that_cannot_start_and_waits_for_one_that_was_killed(
    autojump_clock: MockClock,
) -> None:
    killed, broken = Registration[str](), Registration[str]()
    outcomes: list[str] = []
    with killed.publish("a zygote"):
        pass
    killed.note_failure("the zygote died", 0.5)
    broken.note_failure("the zygote could not import SGLang: no torch", 0.5)

    async def wait(registration: Registration[str]) -> None:
        try:
            outcomes.append(await registration.wait_started())
        except StartFailed as error:
            outcomes.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, killed)
        nursery.start_soon(wait, broken)
        await trio.sleep(1)
        assert outcomes == ["the zygote could not import SGLang: no torch"]
        with killed.publish("another"):
            assert killed.failure is None
            await trio.sleep(1)
    assert outcomes[1:] == ["another"]
