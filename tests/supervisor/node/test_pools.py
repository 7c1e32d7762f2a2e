"""Pools from the file to the gateway: requests of its text reach them, and status, metrics and `/pools` show them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from protocol.messages.cluster import Leg, PoolState
from protocol.messages.text import Respond, Role, Turn
from supervisor.engines.kinds import read_cluster
from supervisor.gateway.request_record import RequestRecord
from supervisor.node.assembly import Assembly
from supervisor.node.pools import service_levels
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL
from tests.rig.pools import PAIRS, WHOLES, worker
from tests.supervisor.config.test_load import Written
from tests.supervisor.engines.test_children_ranks import running

SLOTS = "slots = 1\nsimulated.costs.fixed_s = 0.1\n"


def test_the_pools_of_a_file_are_those_of_its_router(written: Written) -> None:
    file = PAIRS.replace("[model.tiny.grid.prefill]", "itl_target_ms = 3\n[model.tiny.grid.prefill]", 1)
    levels = service_levels(read_cluster(written(file)), "tiny")
    prefill, decode = levels.legs[Leg.PREFILL], levels.legs[Leg.DECODE]
    assert prefill.workers == {"quick": frozenset({"main/p0", "main/p1"}), "cheap": frozenset({"main/p2"})}
    assert (prefill.priorities, prefill.target_ms) == ({"quick": 2, "cheap": 0}, None)
    assert (decode.priorities, decode.target_ms) == ({"short": 1, "long": 0}, 3.0)
    assert prefill.orders["cheap"] == (prefill.workers["cheap"], prefill.workers["quick"])


async def answer(assembly: Assembly, number: int, ttft_ms: float | None = None, tokens_max: int = 5) -> None:
    assert assembly.gateway is not None
    turns = (Turn(Role.USER, "an oak"),)
    request = Respond(f"{number << 16:032x}", turns, tokens_max=tokens_max, ignore_eos=True, ttft_target_ms=ttft_ms)
    record = RequestRecord(request.id, "tiny", "chat", trio.current_time())
    served = assembly.gateway.runner.served["tiny"]
    await assembly.gateway.answer(request, served, record, lambda _: None, lambda answered: answered)


def busy(assembly: Assembly) -> dict[str, int]:
    return {name: worker.in_flight.requests for name, worker in assembly.directory.local.items()}


def samples(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render({}).decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("espalier_pool")
    }


async def test_requests_reach_their_pool_and_wait_for_it_alone(written: Written, autojump_clock: MockClock) -> None:
    text = WHOLES.replace('leg = "both"\n', f'leg = "both"\n{SLOTS}')
    async with running(written, text) as (assembly, metrics), trio.open_nursery() as clients:
        for number in range(3):
            clients.start_soon(partial(answer, assembly, number, 0.0, tokens_max=50))
            await trio.sleep(0.01)
        clients.start_soon(answer, assembly, 9, 1e6)
        await trio.sleep(0.05)
        assert busy(assembly) == {"w0": 1, "w1": 1, "w2": 0}
        quick = PoolState("quick", "tiny", Leg.BOTH, 2, 1, 1, 1, 1, 2)
        assert (await status(assembly)).pools == (quick, PoolState("cheap", "tiny", Leg.BOTH, 0, 1, 1, 1, 1, 0))
        assert samples(metrics) == {
            'espalier_pool_workers_up{pool="quick"}': 1,
            'espalier_pool_workers_up{pool="cheap"}': 1,
            'espalier_pool_busy{pool="quick"}': 1,
            'espalier_pool_busy{pool="cheap"}': 1,
            'espalier_pool_slots{pool="quick"}': 1,
            'espalier_pool_slots{pool="cheap"}': 1,
            'espalier_pool_waiting{pool="quick"}': 2,
            'espalier_pool_waiting{pool="cheap"}': 0,
        }
        clients.cancel_scope.cancel()
    assert set(busy(assembly).values()) == {0}


async def status(assembly: Assembly) -> Any:
    return await assembly.controls._status()  # noqa: SLF001  # what an operator gets over a socket


async def test_counts_of_a_pool_are_by_outcome_and_by_what_stood_in(
    written: Written, autojump_clock: MockClock
) -> None:
    async with running(written, WHOLES) as (assembly, metrics):
        for number, ttft_ms in enumerate((0.0, None, 1e6)):
            await answer(assembly, number, ttft_ms)
        with trio.move_on_after(0.001):
            await answer(assembly, 3, 0.0, tokens_max=50)
        await trio.testing.wait_all_tasks_blocked()
        counts = {name: value for name, value in samples(metrics).items() if "_total" in name}
        assert counts == {
            'espalier_pool_requests_total{outcome="ended",pool="quick"}': 1,
            'espalier_pool_requests_total{outcome="ended",pool="cheap"}': 2,
            'espalier_pool_requests_total{outcome="left",pool="quick"}': 1,
        }
        assert assembly.gateway is not None
        worker = assembly.directory.local["w1"]
        worker.engine = type(worker.engine)()  # it is down
        assembly.directory.notify()
        await answer(assembly, 4, 1e6)
        counts = samples(metrics)
        assert counts['espalier_pool_diversions_total{actual="quick",pool="cheap"}'] == 1
        assert counts['espalier_pool_workers_up{pool="cheap"}'] == 0


async def test_the_document_shows_each_engine_and_each_grid(written: Written, autojump_clock: MockClock) -> None:
    async with running(written, PAIRS) as (assembly, _):
        assert assembly.gateway is not None
        document: Any = assembly.gateway.administration.pools()
        assert [pool["name"] for pool in document["pools"]] == ["quick", "cheap", "short", "long"]
        slots = assembly.directory.local["p0"].idle_offer.slots
        quick = {"name": "quick", "model": "tiny", "leg": "prefill", "priority": 2, "up": 2, "busy": 0, "waiting": 0}
        engines = [{"name": f"main/{name}", "up": True, "busy": 0, "slots": slots} for name in ("p0", "p1")]
        assert document["pools"][0] == quick | {"slots": 2 * slots, "engines": engines}
        assert document["grids"][1] == {
            "model": "tiny",
            "leg": "decode",
            "context_tokens_min": 0,
            "context_tokens_max": 200,
            "context_resolution": 2,
            "itl_min_ms": 5.0,
            "itl_max_ms": 105.0,
            "itl_resolution": 1,
            "itl_target_ms": 55.0,
            "pools": (("short",), ("long",)),
        }


async def test_a_pool_whose_engine_is_not_up_says_so(written: Written) -> None:
    await trio.lowlevel.checkpoint()
    assembly, _ = built_assembly(read_cluster(written(WHOLES)), "main")
    assert assembly.gateway is not None
    document: Any = assembly.gateway.administration.pools()
    assert document["pools"][0]["engines"] == [{"name": "main/w0", "up": False, "busy": 0, "slots": 0}]
    assert (document["pools"][0]["up"], document["pools"][0]["slots"]) == (0, 0)


@pytest.mark.parametrize(
    ("file", "targets"),
    [
        (WHOLES, {"ttft_target_ms"}),
        (PAIRS, {"ttft_target_ms", "itl_target_ms"}),
        (MODEL + worker("w0", "both"), set()),
    ],
)
async def test_a_gateway_takes_the_targets_that_the_grids_of_its_model_read(
    file: str, targets: set[str], written: Written
) -> None:
    await trio.lowlevel.checkpoint()
    assembly, _ = built_assembly(read_cluster(written(file)), "main")
    assert assembly.gateway is not None
    assert assembly.gateway.runner.served["tiny"].targets == targets
