"""The versions of the weights that every kind of engine announces with its answers; the checks return at once without."""

from __future__ import annotations

from actors.engines.port import Engine, Generation
from protocol.messages.generation import Generate, Started, Tokens
from protocol.messages.weights import SetWeightsVersion, WeightsVersion
from protocol.weight_versions import VersionRecord, WeightVersions
from tests.contracts import engine as contract

LONGEST = 1024  # tokens: more than an engine computes before it takes another name, on a busy machine, too


async def versions_of(generation: Generation, started: Started | None = None) -> WeightVersions:
    """Read an answer, perhaps from behind its `started`, and return the versions that were announced for its tokens."""
    record, tokens = VersionRecord(), 0
    if started is not None:
        record.announce(started.version, 0)
    async for reply in generation:
        match reply:
            case Started():
                record.announce(reply.version, 0)
            case Tokens():
                assert not (reply.ids and reply.version), "a version comes before its tokens"
                if reply.version:
                    assert reply.version != record.last, "a version is announced once"
                    record.announce(reply.version, tokens)
                tokens += len(reply.ids)
    finished = await generation.result()
    assert finished is not None
    assert finished.usage.completion_tokens == tokens
    return record.spans(tokens)


async def announces_the_weights_of_an_answer(engine: Engine) -> None:
    if "weights-version" not in engine.info.operations:
        return
    before = await engine.operate(SetWeightsVersion())
    assert isinstance(before, WeightsVersion)
    for version in (before.version, "renamed"):
        await engine.operate(SetWeightsVersion(version))
        async with contract.slot(engine, contract.request(engine, 4)) as generation:
            assert await versions_of(generation) == ((version, 4),)
    await engine.operate(SetWeightsVersion(before.version))


async def announces_new_weights_before_their_first_token(engine: Engine) -> None:
    if "weights-version" not in engine.info.operations:
        return
    before = await engine.operate(SetWeightsVersion())
    assert isinstance(before, WeightsVersion)
    tokens = min(LONGEST, engine.info.request_tokens_max - 8)
    for logprobs in (None, 0):
        for _ in range(contract.TRIES):
            spans = await _renamed_amid(engine, contract.request(engine, tokens), logprobs)
            await engine.operate(SetWeightsVersion(before.version))
            if len(spans) > 1:  # else the whole answer came before the new name
                break
        assert [version for version, _ in spans] == [before.version, "renamed"], spans
        assert sum(count for _, count in spans) == tokens


async def _renamed_amid(engine: Engine, wanted: Generate, logprobs: int | None) -> WeightVersions:
    """Give the weights another name once an answer has begun, and return the versions of its tokens."""
    wanted = Generate(wanted.id, wanted.tokens, wanted.sampling, logprobs)
    async with contract.slot(engine, wanted) as generation:
        started = await anext(generation)
        assert isinstance(started, Started)
        await engine.operate(SetWeightsVersion("renamed"))
        return await versions_of(generation, started)


CHECKS = (announces_the_weights_of_an_answer, announces_new_weights_before_their_first_token)
