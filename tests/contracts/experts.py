"""The contract of every engine that records its experts; the check returns at once without."""

from __future__ import annotations

import json

import pytest

from actors.engines.port import Engine
from protocol.errors import BadRequest, Overloaded
from protocol.messages.experts import DumpExpertRecord, ExpertRecord, StartExpertRecord, StopExpertRecord
from tests.contracts import engine as contract
from tests.contracts import profile


async def records_the_experts_of_every_token(engine: Engine) -> None:
    if "dump-expert-record" not in engine.info.operations:
        return
    for wrong in (DumpExpertRecord(), StopExpertRecord()):
        with pytest.raises(BadRequest, match="start-expert-record"):
            await engine.operate(wrong)
    await contract.complete(engine, contract.request(engine, 4))
    await engine.operate(StartExpertRecord())
    with pytest.raises(Overloaded, match="runs already"):
        await engine.operate(StartExpertRecord())
    _, finished = await contract.complete(engine, contract.request(engine, 8))
    await engine.operate(StopExpertRecord())
    await contract.complete(engine, contract.request(engine, 4))
    record = await engine.operate(DumpExpertRecord())
    assert isinstance(record, ExpertRecord)
    usage = finished.usage
    tokens = usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1  # nobody computes with the last
    assert record.steps == usage.completion_tokens
    a_token = {layer.routed / tokens for layer in record.layers}
    assert len(a_token) == 1, "every layer has every token"
    assert a_token.pop() >= 1
    assert record.routed == sum(layer.routed for layer in record.layers)
    assert all(0 < layer.balancedness <= 1 for layer in record.layers)
    assert len(record.picture.splitlines()) == len(record.layers) + 1
    numbers, picture = record.files
    counts = json.loads(await profile.read_file(engine, numbers))["logical_count"]
    assert [sum(row) for row in counts if any(row)] == [layer.routed for layer in record.layers]
    assert [row.index(max(row)) for row in counts if any(row)] == [layer.busiest for layer in record.layers]
    assert (await profile.read_file(engine, picture)).startswith(b"<svg ")
    assert {*await profile.listed(engine)} >= {*record.files}
    with pytest.raises(BadRequest, match="nothing has been recorded"):
        await engine.operate(DumpExpertRecord())


CHECKS = (records_the_experts_of_every_token,)
