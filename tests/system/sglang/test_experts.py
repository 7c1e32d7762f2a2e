"""The record of experts of a tiny mixture on the real engine: its numbers, its files, and refusals that it outlives."""

from __future__ import annotations

import json

import pytest

from protocol.errors import Unsupported
from protocol.messages.experts import DumpExpertRecord, ExpertRecord, StartExpertRecord, StopExpertRecord
from tests.contracts import experts, profile
from tests.contracts.engine import complete, request
from tests.rig.random_expert_model import EXPERTS, LAYERS, PER_TOKEN, random_expert_model
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

RECORDS = {"expert_distribution_recorder_mode": "stat", "expert_distribution_recorder_buffer_size": 100}


@pytest.mark.nightly
async def test_a_record_counts_the_experts_of_every_token(make_engine: MakeEngine) -> None:
    path = str(random_expert_model())
    async with make_engine(model_path=path, experts=RECORDS, expert_ranks=1) as engine:
        for check in experts.CHECKS:
            await check(engine)
        await engine.operate(StartExpertRecord())
        await complete(engine, request(engine, 25, 20))
        await engine.operate(StopExpertRecord())
        await complete(engine, request(engine, 4))
        record = await engine.operate(DumpExpertRecord())
        assert isinstance(record, ExpertRecord)
        tokens = 20 + 25 - 1  # the last token of an answer is computed with by nobody
        assert (record.routed, record.steps) == (tokens * LAYERS * PER_TOKEN, 25)
        assert record.routed == 176
        assert [(layer.layer, layer.routed) for layer in record.layers] == [(0, 88), (1, 88)]
        assert all(0 < layer.balancedness <= 1 for layer in record.layers)
        numbers, picture = record.files
        counts = json.loads(await profile.read_file(engine, numbers))["logical_count"]
        assert [sum(row) for row in counts] == [88, 88]
        assert [len(row) for row in counts] == [EXPERTS] * LAYERS
        assert (await profile.read_file(engine, picture)).startswith(b"<svg ")
        assert {*await profile.listed(engine)} >= {*record.files}
        assert not [name for name in await profile.listed(engine) if name.endswith(".pt")]
        await complete(engine, request(engine, 4))


async def test_an_engine_that_records_no_experts_refuses_by_name(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        for wrong in (StartExpertRecord(), StopExpertRecord(), DumpExpertRecord()):
            with pytest.raises(Unsupported, match="does not carry out"):
                await engine.operate(wrong)
        await complete(engine, request(engine, 4))
