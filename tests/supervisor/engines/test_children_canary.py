"""The canary in the tree of a node: what freezes is replaced, and what is out of service on purpose is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from actors.canary import CanaryLimits
from actors.engines.simulated.engine import SimulatedEngine
from protocol.errors import StartFailed
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Generate, Tokens
from protocol.messages.operations import FlushCache
from supervisor.cluster import readiness
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.kinds import read_cluster
from supervisor.node.assembly import Assembly
from supervisor.supervision.tree import Tree, render
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL
from tests.rig.fake_engine import generate
from tests.supervisor.engines.test_children import running

FILE = f"""
[node.main]
listen = "127.0.0.1:7401"
[gateway]
port = 0
{MODEL}[engine.one]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
"""
ENDED_WITHIN_S = 20.0  # the defaults
ANSWERED = 'espalier_canaries_total{engine="main/one",outcome="answered",rank="0"}'
LATE = 'espalier_canaries_total{engine="main/one",outcome="late",rank="0"}'
Built = Callable[..., tuple[Assembly, Metrics]]


@pytest.fixture
def built(written: Callable[[str], Path]) -> Built:
    return lambda more="": built_assembly(read_cluster(written(FILE + more)), "main")


def simulated(assembly: Assembly) -> SimulatedEngine:
    engine = assembly.engines["one"].live
    assert engine is not None
    return cast("SimulatedEngine", engine)


def count(metrics: Metrics, series: str) -> float:
    """Return a number of the metrics, 0 if it is not there."""
    lines = (line.rpartition(" ") for line in metrics.render({}).decode().splitlines())
    return sum(float(value) for name, _, value in lines if name == series)


def wanted(name: str, tokens_max: int = 3) -> Generate:
    return generate(name, tokens_max=tokens_max, ignore_eos=True)


async def ask(worker: LocalWorker, request: Generate) -> int:
    async with worker.ask(request, request.sampling.tokens_max) as replies:
        return sum([len(reply.ids) async for reply in replies if isinstance(reply, Tokens)])


def test_every_engine_has_a_canary_unless_its_file_says_no(built: Built) -> None:
    assembly, _ = built()
    text = render(assembly.tree)
    assert "asks the idle engine for a token" in text
    [worker] = [child for child in assembly.tree.children if child.name == "one"]
    assert isinstance(worker, Tree)
    assert [child.name for child in worker.children] == ["engine", "decode", "canary"]
    assert "canary" not in render(built("canary.enabled = false\n")[0].tree)
    assert CanaryLimits().enabled


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("canary.after_s = 0.0", "canary.after_s"),
        ("canary.within_s = -1.0", "canary.within_s"),
        ('leg = "encode"\ncanary.after_s = 5.0', "canary: is for engines that compute tokens"),
        ("canary.after_s = 1e-9", "canary.after_s: is 1e-09 s, which no clock tells from nothing"),
    ],
)
def test_keys_of_a_canary_that_mean_nothing_are_mistakes(line: str, mistake: str, built: Built) -> None:
    with pytest.raises(StartFailed) as caught:
        built(line + "\n")
    assert mistake in str(caught.value)


async def test_an_engine_that_stalls_while_idle_is_replaced_within_the_canarys_time_and_all_say_why(
    built: Built, autojump_clock: MockClock
) -> None:
    assembly, metrics = built()
    async with running(assembly, "one") as worker:
        await trio.sleep(24)
        assert count(metrics, ANSWERED) == 2
        first = simulated(assembly)
        first.stall(1e9)
        stalled_at = trio.current_time()
        sentences = set[str | None]()
        while assembly.engines["one"].live is first:  # noqa: ASYNC110  # by how much it is late is the question
            await trio.sleep(0.01)
        while assembly.engines["one"].live is None:
            sentences.add(readiness.unready(assembly.directory, ["tiny"]))
            await trio.sleep(0.01)
        assert trio.current_time() - stalled_at < ENDED_WITHIN_S + 1
        sentence = "engine one failed: its canary got no whole answer within 10 s; next try now"
        assert sentence in sentences, sentences
        assert count(metrics, LATE) == 1
        [canary] = [child for child in assembly.status.members() if child.path == "main/one/canary"]
        assert (canary.last_error, canary.restarts) == ("its canary got no whole answer within 10 s", 1)
        assert await ask(worker, wanted("r")) == 3
        assert readiness.unready(assembly.directory, ["tiny"]) is None


async def test_canaries_are_in_no_load_and_no_announcement(built: Built, autojump_clock: MockClock) -> None:
    assembly, metrics = built("simulated.costs.fixed_s = 4.0\n")
    async with running(assembly, "one") as worker:
        loads = {worker.in_flight.requests, worker.in_flight.tokens}
        version = assembly.directory.load_version
        busy = False
        for _ in range(300):
            await trio.sleep(0.1)
            loads |= {worker.in_flight.requests, worker.in_flight.tokens, worker.offer.running, worker.offer.tokens}
            busy |= await simulated(assembly).load() != EngineLoad(0, 0, 0)
        assert busy, "the engine had canaries"
        assert loads == {0}
        assert assembly.directory.load_version == version
        assert count(metrics, 'espalier_canary_seconds_count{engine="main/one",rank="0"}') == 2
        assert worker.inbox.waiting == (0, 0)


async def test_an_engine_out_of_service_lives_is_not_chosen_says_why_and_has_no_canary(
    built: Built, autojump_clock: MockClock
) -> None:
    assembly, metrics = built("simulated.costs.fixed_s = 4.0\n")
    async with running(assembly, "one") as worker, trio.open_nursery() as nursery:
        await trio.sleep(12)
        engine, registration = simulated(assembly), assembly.engines["one"]
        got: list[int] = []
        with registration.out_of_service("its weights are replaced"), registration.out_of_service("another reason"):
            await trio.sleep(1)
            assert await engine.load() == EngineLoad(0, 0, 0), "the canary has left"
            assert (registration.current, registration.live) == (None, engine)
            why = "is out of service: its weights are replaced"
            assert readiness.unready(assembly.directory, ["tiny"]) == f"engine one {why}"
            [offer] = assembly.directory.state().offers
            assert (offer.up, offer.why) == (False, why)

            async def wait() -> None:
                got.append(await ask(worker, wanted("r")))

            nursery.start_soon(wait)
            await trio.sleep(100)
            assert await engine.load() == EngineLoad(0, 0, 0), "neither a request nor a canary comes to it"
            await worker.call(FlushCache())  # an operator reaches it all the same
        assert readiness.unready(assembly.directory, ["tiny"]) is None
        await trio.sleep(13)
        assert got == [3], "a request that came meanwhile has waited"
        await trio.sleep(20)
        assert count(metrics, ANSWERED) == 1
        assert simulated(assembly) is engine, "nobody restarts it"
