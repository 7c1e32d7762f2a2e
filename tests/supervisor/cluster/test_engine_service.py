"""An engine as other nodes ask it: each request goes to the rank that it names, and to no other engine's."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import evolve

from protocol.errors import BadRequest
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from tests.rig.fake_engine import generate
from tests.rig.nodes import add_worker

ID = "ab" * 16


class Noting:
    """The address of an engine that notes the ranks for which it is asked."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    @asynccontextmanager
    async def ask(self, request: Any, _: int) -> Any:
        self.ranks.append(request.rank)
        yield None  # noqa: ASYNC119


def engine_of(ranks: int) -> tuple[EngineService, Noting]:
    directory, address = Directory("here"), Noting()
    workers = [add_worker(directory, f"e#{rank}") for rank in range(ranks)]
    for worker in workers:
        worker.address, worker.ranks = address, ranks  # type: ignore[assignment]
    return EngineService(workers[0], "other", tuple(workers[1:])), address


async def test_a_request_counts_at_the_rank_that_it_names() -> None:
    guarded, address = engine_of(3)
    async with guarded.ask(evolve(generate(ID, tokens_max=3), rank=2), 3):
        assert [worker.in_flight.requests for worker in (guarded.worker, *guarded.others)] == [0, 0, 1]
    assert address.ranks == [2]


@pytest.mark.parametrize("rank", [-1, 3, 2**63])
async def test_a_rank_that_there_is_not_is_the_askers_mistake(rank: int) -> None:
    guarded, address = engine_of(3)
    with pytest.raises(BadRequest, match=r"rank must be from 0 to 2, got"):
        async with guarded.ask(evolve(generate(ID), rank=rank), 9):
            pass
    async with guarded.ask(generate(ID), 9):  # its id is not in use
        assert address.ranks == [0]


async def test_an_id_is_in_use_at_all_ranks() -> None:
    guarded, _ = engine_of(2)
    async with guarded.ask(generate(ID), 9):
        with pytest.raises(BadRequest, match="is being answered already"):
            async with guarded.ask(evolve(generate(ID), rank=1), 9):
                pass
