"""An engine kind is one row: a section with its mistakes, and a function that makes children."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import evolve, frozen
from trio.testing import MockClock

from actors.engines.port import Engine, Generation
from actors.engines.simulated import hand_off as simulated
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.spec import SimulatedSpec
from actors.kit.hand_off import KindHandOff
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo, EngineLoad, GetLoad, HandOff
from protocol.messages.generation import Generate
from protocol.messages.operations import CheckGrammar
from protocol.messages.text import Respond
from protocol.strict.mistakes import Mistake
from supervisor.config.schema import Cluster, EngineSection
from supervisor.engines.kind import EngineChild, EngineKind, KindChildren, NodeContext
from supervisor.engines.kinds import KINDS, check_host, read_cluster
from supervisor.engines.work import LocalEngine
from supervisor.node.assembly import Assembly
from supervisor.supervision.registration import Registration
from supervisor.supervision.supervise import supervise
from supervisor.supervision.tree import Child
from tests.contracts.engine import check_engine
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL

FILE = f"""
[gateway]
port = 0
{MODEL}[engine.one]
model = "tiny"
kind = "example-kind"
kv_tokens_max = 4096
"""


# What `supervisor/engines/KIND/` would have --------------------------------------------------


@frozen(kw_only=True)
class ExampleSection(EngineSection):
    """`[engine.NAME]` with `kind = "example-kind"`."""

    kind: str = "example-kind"
    voices: int = 1
    example_port: int | None = None

    @classmethod
    def reserves(cls, name: str) -> bool:
        return name == "example-room"

    @property
    def ports(self) -> dict[str, range]:
        return {} if self.example_port is None else {"example_port": range(self.example_port, self.example_port + 1)}

    def mistakes(self, cluster: Cluster, path: str) -> Iterator[Mistake]:
        if self.voices > self.slots:
            yield Mistake(f"{path}.voices", f"must be at most slots ({self.slots})")


def example_children(context: NodeContext) -> KindChildren:
    room, states = Registration[str](), HeldStates()
    shared = Child(name="example-room", run=_room, args=(room,))
    return KindChildren(partial(_engine, context, room, states), before=(shared,), published={"example-room": room})


def _engine(context: NodeContext, room: Registration[str], states: HeldStates, local: LocalEngine) -> EngineChild:
    child = Child(name="engine", run=_run, args=(context, room, states, local))
    return EngineChild(child, about=f"in {local.section.voices} voices", needs=("example-room",))  # type: ignore[attr-defined]


async def _room(room: Registration[str], *, task_status: trio.TaskStatus[None]) -> None:
    with room.publish("a large hall"):
        task_status.started()
        await trio.sleep_forever()


class ExampleEngine(SimulatedEngine):
    """What computes: its legs hand over one after the other."""

    asked: list[bool]  # whether each request had a hand-off

    @property
    def info(self) -> EngineInfo:
        return evolve(super().info, kind="example-kind")

    def submit(self, request: Generate) -> Generation:
        self.asked.append(bool(request.hand_off))
        return super().submit(request)


async def _run(
    context: NodeContext,
    room: Registration[str],
    states: HeldStates,
    local: LocalEngine,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    assert room.current is not None, "it needs its room"
    section = local.section
    spec = SimulatedSpec(
        leg=Leg(section.leg),
        hand_off=HandOff.SEQUENTIAL,
        slots=section.slots,
        kv_tokens_max=section.kv_tokens_max,
        context_max=2048,
    )
    engine = ExampleEngine(spec, context.runtime.chance(0), states=states)
    engine.asked = []
    with local.registration.publish(engine):
        await engine.run(task_status=task_status)


def check_example(name: str, _: EngineSection) -> None:
    raise StartFailed(f"engine {name} finds no walls here")


EXAMPLE_HAND_OFF = KindHandOff(simulated.without_partner)  # it is sequential: routers make nothing


# The seam ------------------------------------------------------------------------------------


@pytest.fixture
def example_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        KINDS, "example-kind", EngineKind(ExampleSection, example_children, check_example, hand_off=EXAMPLE_HAND_OFF)
    )


@pytest.fixture
def read(written: Callable[[str], Path]) -> Callable[..., Cluster]:
    return lambda more="": read_cluster(written(FILE + more))


def test_a_kind_without_a_row_is_a_mistake(read: Callable[..., Cluster]) -> None:
    every = " or ".join(f'"{kind}"' for kind in KINDS)
    with pytest.raises(StartFailed, match=re.escape(f'engine.one.kind: expected {every}, got "example-kind"')):
        read()


@pytest.mark.usefixtures("example_kind")
def test_a_kind_has_keys_of_its_own_which_no_other_kind_has(read: Callable[..., Cluster]) -> None:
    section = read("voices = 3\n").engine["one"]
    assert isinstance(section, ExampleSection)
    assert section.voices == 3
    with pytest.raises(StartFailed, match=re.escape('engine.one.device: is for engines of kind "sglang"')):
        read('device = "cpu"\n')
    other = '[engine.two]\nmodel = "tiny"\nkind = "simulated"\nkv_tokens_max = 4096\nvoices = 2\n'
    with pytest.raises(StartFailed, match=re.escape('engine.two.voices: is for engines of kind "example-kind"')):
        read(other)
    with pytest.raises(StartFailed, match=re.escape("engine.one.voice: is not a key here; did you mean voices?")):
        read("voice = 2\n")


@pytest.mark.usefixtures("example_kind")
def test_a_kind_finds_its_own_mistakes_between_keys(read: Callable[..., Cluster]) -> None:
    with pytest.raises(StartFailed, match=re.escape("line 10: engine.one.voices: must be at most slots (16)")):
        read("voices = 17\n")
    with pytest.raises(StartFailed, match=re.escape("engine.example-room: is the name of another part of the tree")):
        read('[engine.example-room]\nmodel = "tiny"\nkind = "simulated"\nkv_tokens_max = 4096\n')
    spanning = '[node.main]\nlisten = "127.0.0.1:7401"\n'
    sglang = (
        '[engine.two]\nmodel = "tiny"\ndevice = "cuda"\ntensor_parallel = 2\nranks_on = ["b"]\nkv_tokens_max = 4096\n'
    )
    more = f"example_port = 9000\n{sglang}dist_port = 9000\n{spanning}[node.b]\n"
    with pytest.raises(
        StartFailed, match=re.escape("engine.two.dist_port: is engine.one.example_port on the same host")
    ):
        read(more)


@pytest.mark.usefixtures("example_kind")
def test_a_kind_reports_what_a_host_lacks(read: Callable[..., Cluster]) -> None:
    with pytest.raises(StartFailed, match="engine one finds no walls here"):
        check_host(read(), "main")


@asynccontextmanager
async def node(cluster: Cluster) -> AsyncIterator[Assembly]:
    """Run what stands behind the gateway of a node."""
    assembly, _ = built_assembly(cluster, "main")
    members = [child for child in assembly.tree.children if child.name != "gateway"]
    members = [evolve(child, needs=tuple(name for name in child.needs or () if name != "gateway")) for child in members]
    tree = evolve(assembly.tree, children=tuple(members))
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: supervise(tree, rng=random.Random(0), task_status=task_status))
        yield assembly
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("example_kind")
async def test_an_engine_of_a_new_kind_answers_clients_and_keeps_the_contract(
    read: Callable[..., Cluster], autojump_clock: MockClock
) -> None:
    async with node(read("voices = 2\n")) as assembly:
        names = [child.name for child in assembly.tree.children]
        assert names.index("example-room") < names.index("one") < names.index("router-tiny")
        wanted = Respond(f"{1:032x}", token_lists=((5, 6, 7),), tokens_max=3, ignore_eos=True)
        assert assembly.gateway is not None
        async with assembly.gateway.runner.served["tiny"].ask.ask(wanted, 100) as replies:
            assert [reply async for reply in replies]
        engine = await assembly.engines["one"].wait()

        @asynccontextmanager
        async def same() -> AsyncIterator[Engine]:
            yield engine

        await check_engine(same)


PAIR = """leg = "prefill"
canary = { after_s = 5.0, within_s = 5.0 }
voices = 2
[engine.two]
model = "tiny"
kind = "example-kind"
kv_tokens_max = 4096
leg = "decode"
canary = { after_s = 5.0, within_s = 5.0 }
"""


@pytest.mark.usefixtures("example_kind")
async def test_a_prefill_and_a_decode_of_a_new_kind_hand_over_one_after_the_other(
    read: Callable[..., Cluster], autojump_clock: MockClock
) -> None:
    async with node(read(PAIR)) as assembly:
        engines = [await assembly.engines[name].wait() for name in ("one", "two")]
        wanted = Respond(f"{1:032x}", token_lists=((5, 6, 7),), tokens_max=3, ignore_eos=True)
        assert assembly.gateway is not None
        async with assembly.gateway.runner.served["tiny"].ask.ask(wanted, 100) as replies:
            assert [reply async for reply in replies]
        assert [engine.asked for engine in engines] == [[False], [True]]  # type: ignore[attr-defined]
        assert [await engine.load() for engine in engines] == [EngineLoad(0, 0, 0)] * 2
        await trio.sleep(12)
        assert [engine.asked for engine in engines] == [[False] * 3, [True] * 3], "a canary, and another"  # type: ignore[attr-defined]
        assert [assembly.engines[name].current for name in ("one", "two")] == engines, "and none was restarted"


@pytest.mark.usefixtures("example_kind")
def test_the_rest_of_a_node_knows_a_new_kind_by_its_children_alone(read: Callable[..., Cluster]) -> None:
    assembly, _ = built_assembly(read('voices = 2\n[node.main]\nlisten = "127.0.0.1:7401"\n'), "main")
    members = {child.name: child for child in assembly.tree.children}
    assert members["one"].about == "tiny in 2 voices"
    assert "example-room" in (members["one"].needs or ())
    assert assembly.published.keys() >= {"example-room", "one"}
    assert assembly.links is not None
    assert {("one", Generate), ("one", GetLoad), ("one", CheckGrammar)} <= assembly.links.services.keys()
