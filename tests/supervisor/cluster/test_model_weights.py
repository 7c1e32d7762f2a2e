"""One version of weights for the engines of a model: updates, crashes in them, and engines that start later."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.port import Engine
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.weights import GONE
from protocol.errors import BadRequest, EngineRefused, RequestError
from protocol.messages.cluster import Leg, NodeState, Offer
from protocol.messages.engine import encoder_info
from protocol.messages.generation import Finished, Generate, Sampling
from protocol.messages.kind import Message
from protocol.messages.weights import (
    BeginWeightsUpdate,
    EndWeightsUpdate,
    SetWeightsVersion,
    UpdateWeightsFromDisk,
    WeightsUpdated,
    WeightsVersion,
)
from protocol.token_ids import TokenIds
from protocol.weights_record import FIRST_WEIGHTS, WeightsRecord
from supervisor.cluster import operations
from supervisor.cluster.cluster_worker import ClusterWorker
from supervisor.engines.kinds import read_cluster
from supervisor.node.assembly import Assembly
from supervisor.supervision.registration import Registration
from supervisor.supervision.supervise import supervise
from tests.contracts.weights import file_of, update_of
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL
from tests.rig.encoders import MEDIA
from tests.rig.gateway import INFO
from tests.rig.nodes import add_worker, linked_directory

ENGINE = """
[engine.{name}]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
slots = 8
"""
NAMES = ("one", "three", "two")
FILE = f"""
[node.main]
[gateway]
port = 0
{MODEL}{"".join(ENGINE.format(name=name) for name in NAMES)}"""
TENSORS = file_of({"simulated.weight": ("F32", [2, 2], bytes(range(16)))})

_numbers = count(1)


class Fleet:
    """The engines of a node that runs, and what is asked of them."""

    def __init__(self, assembly: Assembly) -> None:
        self.directory, self.engines = assembly.directory, assembly.engines

    async def ask(self, request: Message, engine: str | None = None) -> dict[str, Message | RequestError]:
        """Have engines carry out an operation, and return the outcomes by their names."""
        outcomes = await operations.operate(self.directory, request, engine)
        return {name.removeprefix("main/"): outcome for name, outcome in outcomes.items()}

    async def update(self, step: int, engine: str | None = None) -> Mapping[str, Message | RequestError]:
        return await self.ask(UpdateWeightsFromDisk(folder=f"/{step}", version=f"step-{step}"), engine)

    def live(self, name: str) -> SimulatedEngine:
        live = self.engines[name].live
        assert isinstance(live, SimulatedEngine)
        return live

    @property
    def records(self) -> dict[str, WeightsRecord]:
        """The records of the engines that can be asked."""
        return {worker.name: worker.offer.weights for worker in self.serving}

    @property
    def serving(self) -> list[ClusterWorker]:
        return self.directory.workers("tiny")

    async def serves(self, step: int, *names: str) -> None:
        """Check that these engines serve with the weights of a step, once they are up, and no other does."""
        with trio.fail_after(30):
            while {worker.name for worker in self.serving} != set(names):
                await self.directory.wait_changed()
        assert {(record.version, record.folder) for record in self.records.values()} == {(f"step-{step}", f"/{step}")}
        assert len(set(self.records.values())) == 1
        for worker in self.serving:
            request = Generate(f"{next(_numbers):032x}", TokenIds.of([1, 2, 3]), Sampling(4))
            async with worker.ask(request, 4) as answer:
                assert isinstance(await answer.result(), Finished)


@pytest.fixture
async def fleet(written: Callable[[str], Path], autojump_clock: MockClock) -> AsyncIterator[Fleet]:
    async with running(built_assembly(read_cluster(written(FILE)), "main")[0]) as fleet:
        yield fleet


@asynccontextmanager
async def running(assembly: Assembly) -> AsyncIterator[Fleet]:
    """Run the engines of a node, and the child that brings them new weights."""
    members = [child for child in assembly.tree.children if child.name in {*NAMES, "weights"}]
    tree = evolve(assembly.tree, children=tuple(evolve(child, needs=()) for child in members))
    async with trio.open_nursery() as nursery:
        run = partial(supervise, tree, on_event=assembly.on_event, rng=random.Random(0))
        await nursery.start(lambda task_status: run(task_status=task_status))
        yield Fleet(assembly)
        nursery.cancel_scope.cancel()


async def test_all_engines_get_the_weights_of_a_folder(fleet: Fleet, autojump_clock: MockClock) -> None:
    for step in (1, 2):
        outcomes = await fleet.update(step)
        (result,) = {*outcomes.values()}
        assert isinstance(result, WeightsUpdated)
        assert set(fleet.records.values()) == {WeightsRecord(step, f"step-{step}", result.checksum, f"/{step}")}
    await fleet.serves(2, *NAMES)


async def test_no_engine_is_updated_if_one_would_refuse(fleet: Fleet, autojump_clock: MockClock) -> None:
    """One engine has the version of another folder, so it is no new one for it."""
    await fleet.update(1)
    live = fleet.live("two")
    live_weights = await live.operate(SetWeightsVersion("step-2"))
    assert live_weights is not None
    outcomes = await fleet.update(2)
    assert isinstance(outcomes["two"], BadRequest)
    for name in ("one", "three"):
        error = outcomes[name]
        assert isinstance(error, EngineRefused)
        assert error.detail == "nothing was done, since engine main/two would not have been updated"
    await fleet.serves(1, *NAMES)
    outcomes = await fleet.ask(UpdateWeightsFromDisk(folder=GONE, version="gone"))
    assert all(isinstance(outcome, BadRequest) for outcome in outcomes.values())
    await fleet.serves(1, *NAMES)


@pytest.mark.parametrize("at_s", [0.0, 0.005, 0.02, 0.04, 0.049, 0.051, 0.06, 0.2])
async def test_an_engine_that_ends_in_an_update_serves_again_with_the_new_weights(
    at_s: float, fleet: Fleet, autojump_clock: MockClock
) -> None:
    await fleet.update(1)
    life = fleet.live("two")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.update, 2)
        await trio.sleep(at_s)
        life.crash()
    while fleet.engines["two"].live in {life, None}:
        await fleet.directory.wait_changed()
    await fleet.serves(2, *NAMES)


async def test_the_last_version_holds_where_no_engine_got_the_next_one(fleet: Fleet, autojump_clock: MockClock) -> None:
    await fleet.update(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.update, 2)
        await trio.sleep(0.02)
        for name in NAMES:
            fleet.live(name).crash()
    assert fleet.serving == []
    await fleet.serves(1, *NAMES)


async def test_weights_that_came_as_tensors_have_to_be_sent_again(fleet: Fleet, autojump_clock: MockClock) -> None:
    async def send(version: str, engine: str | None = None) -> dict[str, Message | RequestError]:
        await fleet.ask(BeginWeightsUpdate(), engine)
        await fleet.ask(update_of(TENSORS), engine)
        return await fleet.ask(EndWeightsUpdate(version), engine)

    await send("sent")
    newest = fleet.directory.newest_weights("tiny").record
    assert set(fleet.records.values()) == {newest}
    fleet.live("two").crash()
    await trio.sleep(100)
    assert set(fleet.records) == {"one", "three"}
    out = "is out of service: its weights are those of its start, and its model has version 'sent'"
    assert fleet.engines["two"].status_text == out
    assert await send("sent", "two") == {"two": WeightsUpdated("sent", newest.checksum)}
    assert fleet.records == dict.fromkeys(NAMES, newest)


async def test_an_engine_with_other_weights_under_the_same_version_is_started_again(
    fleet: Fleet, autojump_clock: MockClock
) -> None:
    await fleet.update(1)
    fleet.live("two").crash()
    await trio.sleep(0.5)
    life = fleet.live("two")
    outcome = (await fleet.ask(UpdateWeightsFromDisk(folder="/other", version="step-1"), "two"))["two"]
    assert isinstance(outcome, EngineRefused)
    assert "the weights of version 'step-1' have the checksum" in outcome.detail
    assert outcome.detail.endswith("the engine is started again")
    await fleet.serves(1, *NAMES)
    assert fleet.live("two") is not life


async def test_one_engine_alone_takes_the_others_along(fleet: Fleet, autojump_clock: MockClock) -> None:
    outcomes = await fleet.update(1, "two")
    assert list(outcomes) == ["two"]
    assert list(fleet.records) == ["two"], "the others are behind"
    await fleet.serves(1, *NAMES)


async def test_a_session_that_one_engine_does_not_begin_is_undone(fleet: Fleet, autojump_clock: MockClock) -> None:
    await fleet.update(1)
    await fleet.ask(BeginWeightsUpdate(), "two")
    outcomes = await fleet.ask(BeginWeightsUpdate())
    assert all(isinstance(outcome, BadRequest) for outcome in outcomes.values())
    await fleet.serves(1, "one", "three")
    await fleet.ask(EndWeightsUpdate(""), "two")
    await fleet.serves(1, *NAMES)


async def test_all_engines_get_a_new_name_of_their_weights(fleet: Fleet, autojump_clock: MockClock) -> None:
    for update in (False, True):
        if update:
            await fleet.update(1)
        outcomes = await fleet.ask(SetWeightsVersion("renamed"))
        assert set(outcomes.values()) == {WeightsVersion("renamed")}
        assert set(fleet.records) == set(NAMES)
        assert {record.version for record in fleet.records.values()} == {"renamed"}


async def test_an_engine_that_is_behind_gets_no_new_name(fleet: Fleet, autojump_clock: MockClock) -> None:
    """Its older weights would have the name of the newest."""
    await fleet.update(1)
    fleet.live("two").crash()
    await trio.sleep(0.5)
    outcomes = await fleet.ask(SetWeightsVersion("renamed"))
    error = outcomes["two"]
    assert isinstance(error, EngineRefused)
    assert error.detail.endswith("update it first")
    assert set(fleet.records) == {"one", "three"}


async def test_an_engine_that_is_behind_ends_a_session_of_whole_weights_only(
    fleet: Fleet, autojump_clock: MockClock
) -> None:
    await fleet.update(1)
    fleet.live("two").crash()
    await trio.sleep(0.5)
    await fleet.ask(BeginWeightsUpdate())
    outcomes = await fleet.ask(EndWeightsUpdate("part"))
    error = outcomes["two"]
    assert isinstance(error, EngineRefused)
    assert error.detail == "replace every tensor, since those before were of older weights: 1 are missing"
    assert set(fleet.records) == {"one", "three"}
    await fleet.ask(update_of(TENSORS), "two")
    outcomes = await fleet.ask(EndWeightsUpdate("whole"), "two")
    assert isinstance(outcomes["two"], WeightsUpdated)
    assert set(fleet.records) == {"two"}, "it has the newest version now"


async def test_an_update_that_a_newer_one_has_overtaken_is_refused(fleet: Fleet, autojump_clock: MockClock) -> None:
    await fleet.update(1)
    late = UpdateWeightsFromDisk(folder="/late", version="late", serial=1)
    worker = fleet.directory.local["one"]
    with pytest.raises(EngineRefused, match="a newer update has come before, of version 'step-1'"):
        await worker.call(late)
    for request in (late, evolve(late, serial=-1), evolve(late, serial=2**60), evolve(late, version="v" * 200)):
        with pytest.raises(BadRequest):
            await fleet.ask(request)
    await fleet.serves(1, *NAMES)


async def test_an_operation_asked_as_a_life_ends_has_an_outcome_at_once(
    fleet: Fleet, autojump_clock: MockClock
) -> None:
    fleet.live("two").crash()
    outcomes = await fleet.ask(BeginWeightsUpdate(), "two")
    assert isinstance(outcomes["two"], RequestError)
    assert trio.current_time() < 5


async def test_the_same_tensors_may_be_sent_again_to_all(fleet: Fleet, autojump_clock: MockClock) -> None:
    for _ in range(2):
        await fleet.ask(BeginWeightsUpdate())
        await fleet.ask(update_of(TENSORS))
        outcomes = await fleet.ask(EndWeightsUpdate("sent"))
        assert all(isinstance(outcome, WeightsUpdated) for outcome in outcomes.values())
    assert {record.serial for record in fleet.records.values()} == {2}
    assert set(fleet.records) == set(NAMES)


def offer(name: str, weights: WeightsRecord = FIRST_WEIGHTS) -> Offer:
    """Return the offer of an engine that serves."""
    return Offer(name, "oak", Leg.BOTH, 2, up=True, engine=INFO, weights=weights)


async def test_no_worker_of_another_node_is_asked_that_is_behind() -> None:
    """A node without a link to the newest engine announces that its own serves."""
    await trio.lowlevel.checkpoint()
    directory, _ = linked_directory()
    directory.merge_state("far", NodeState((offer("old"),)))
    assert [worker.name for worker in directory.workers("oak")] == ["old"]
    newest = WeightsRecord(1, "step-1", "aa", "/1")
    directory.merge_state("far", NodeState((offer("old"), offer("new", newest))))
    assert [worker.name for worker in directory.workers("oak")] == ["new"]
    (old,) = [each for each in directory.offers("oak") if each.name == "old"]
    assert old.why == "is out of service: its weights are those of its start, and its model has version 'step-1'"
    directory.newest_weights("oak").note(WeightsRecord(2, "step-2"))
    assert directory.workers("oak") == []


async def test_an_encoder_has_no_weights_that_could_be_behind() -> None:
    await trio.lowlevel.checkpoint()
    directory, _ = linked_directory()
    directory.newest_weights("oak").note(WeightsRecord(1, "step-1"))
    eyes = Offer("eyes", "oak", Leg.ENCODE, 2, up=True, engine=encoder_info("seeing", "1", MEDIA, 4))
    directory.merge_state("far", NodeState((eyes,)))
    assert [worker.name for worker in directory.workers("oak")] == ["eyes"]
    local = add_worker(directory)
    local.idle_offer = evolve(local.idle_offer, leg=Leg.ENCODE)
    local.engine = Registration(current=cast("Engine", object()))
    assert local.is_up
