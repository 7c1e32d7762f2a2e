"""The recorded fake of TensorRT-LLM: its calls are those that are published, and it behaves and fails as reported."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from attrs import fields_dict
from PIL import Image

from actors.engines.trtllm import signatures
from actors.engines.trtllm.signatures import REQUIRED, TABLE, Signatures
from tests.rig.adapters import write_adapter
from tests.rig.fake_tensorrt_llm.tensorrt_llm import LLM, MultimodalEncoder, RequestOutput, _executor, _types
from tests.rig.fake_tensorrt_llm.tensorrt_llm._faults import DEATH_CODE, Fault, prompt_of
from tests.rig.fake_tensorrt_llm.tensorrt_llm._llm import ARGUMENTS, VOCABULARY
from tests.rig.fake_tensorrt_llm.tensorrt_llm._torch.shared_tensor import SharedTensorContainer
from tests.rig.fake_tensorrt_llm.tensorrt_llm._types import (
    CompletionOutput,
    DisaggregatedParams,
    GuidedDecodingParams,
    Logprob,
    LoraConfig,
    LoRARequest,
    PreprocessedInputs,
    RequestError,
    SamplingParams,
    SchedulingParams,
)
from tests.rig.trtllm_engines import image_model

ReturnedT = TypeVar("ReturnedT")
WITHIN_S = 20.0
PAIR: dict[str, Any] = {"cache_transceiver_config": {"backend": "DEFAULT"}}
PROMPT = [*range(40, 60)]
LORA: dict[str, Any] = {"lora_target_modules": ["attn_q", "attn_k", "attn_v"]}


@pytest.fixture(autouse=True)
def _fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_FAKE_TRTLLM_FOLDER", str(tmp_path))
    monkeypatch.setattr(_executor, "STEP_S", 0.0)


def run(body: Callable[[], Coroutine[Any, Any, ReturnedT]]) -> ReturnedT:
    async def bounded() -> ReturnedT:
        async with asyncio.timeout(WITHIN_S):
            return await body()

    return asyncio.run(bounded())


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"end_id": -1, "max_tokens": 8} | changes)


def ask(llm: LLM, prompt: list[int] = PROMPT, *, streaming: bool = True, **changes: Any) -> RequestOutput:
    """Return an answer; the changes are of the sampling, and of the call if it has them."""
    call = {name: changes.pop(name) for name in [*changes] if name in inspect.signature(llm.generate_async).parameters}
    return llm.generate_async(prompt, params(**changes), streaming=streaming, **call)


async def read(output: RequestOutput) -> CompletionOutput:
    """Read an answer to its end."""
    async for step in output:
        assert step is output, "it yields itself"
    return output.outputs[0]


async def tokens(llm: LLM, prompt: list[int] = PROMPT, **changes: Any) -> list[int]:
    return (await read(ask(llm, prompt, **changes))).token_ids


async def handed(llm: LLM, prompt: list[int] = PROMPT, **changes: Any) -> tuple[RequestOutput, DisaggregatedParams]:
    """Return a prefill's answer and its state, as a decode is to be given it."""
    output = ask(
        llm, prompt, streaming=False, disaggregated_params=DisaggregatedParams(request_type="context_only"), **changes
    )
    state = (await read(output)).disaggregated_params
    assert state is not None
    return output, DisaggregatedParams(
        request_type="generation_only",
        first_gen_tokens=state.first_gen_tokens,
        ctx_request_id=state.ctx_request_id,
        opaque_state=state.opaque_state,
    )


def used(llm: LLM) -> int:
    executor = llm._executor  # noqa: SLF001
    assert executor is not None
    return sum(cache.used for cache in executor.caches)


def is_empty(llm: LLM) -> bool:
    return used(llm) == 0


def is_healthy(llm: LLM) -> bool:
    return llm._check_health()  # noqa: SLF001  # Dynamo asks for it, too


def call(llm: LLM, method: str, tag: str = "kv_cache") -> None:
    llm._collective_rpc(method, args=([tag],))  # noqa: SLF001


async def found_at(llm: LLM) -> int:
    """Return the rank that a request without a wish went to."""
    output = ask(llm)
    await read(output)
    return output._request.rank  # noqa: SLF001


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


# Its signatures ------------------------------------------------------------------------


CALLED: dict[str, Callable[..., object]] = {
    signatures.LLM_INIT: LLM.__init__,
    signatures.GENERATE: LLM.generate_async,
    signatures.STATS: LLM.get_stats_async,
    signatures.KV_EVENTS: LLM.get_kv_cache_events_async,
    signatures.CAPACITY: LLM.get_kv_cache_capacity,
    signatures.SHUTDOWN: LLM.shutdown,
    signatures.COLLECTIVE_RPC: LLM._collective_rpc,  # noqa: SLF001
    signatures.ABORT: RequestOutput.abort,
    signatures.AWAIT: RequestOutput.result,
    signatures.PREPROCESS: LLM.preprocess,
    signatures.PREPROCESSED: PreprocessedInputs,
    signatures.SHARE: SharedTensorContainer.from_tensor,
    signatures.OPEN_SHARED: SharedTensorContainer.from_dict,
    signatures.ENCODER_INIT: MultimodalEncoder.__init__,
    signatures.ENCODE: MultimodalEncoder.generate_async,
    signatures.SAMPLING: SamplingParams,
    signatures.GUIDED: GuidedDecodingParams,
    signatures.HANDED: DisaggregatedParams,
    signatures.SCHEDULING: SchedulingParams,
    signatures.LORA: LoRARequest,
    signatures.LORA_CONFIG: LoraConfig,
    signatures.LOGPROB: Logprob,
}
ATTRIBUTES = {
    signatures.CHOICE: {*fields_dict(CompletionOutput)},
    signatures.RESULT: {*vars(RequestOutput(_executor.Request(1, [1], params(), True, None, None, 0, 0.5, 0, None)))},
}


def defaults(called: Callable[..., object]) -> Mapping[str, object]:
    """Return the parameters of a call with their defaults; of `LLM`, what it takes by name as well."""
    found = {
        name: REQUIRED if each.default is inspect.Parameter.empty else each.default
        for name, each in inspect.signature(called).parameters.items()
        if name != "self" and each.kind is not inspect.Parameter.VAR_KEYWORD and not name.startswith("_")
    }
    return {**ARGUMENTS, **found} if called is LLM.__init__ else found


@pytest.mark.parametrize("callee", CALLED)
def test_it_takes_what_is_published_and_nothing_else(callee: str) -> None:
    own = defaults(CALLED[callee])
    for each in TABLE[callee]:
        assert own[each.name] == each.default, each.name
    extra = own.keys() - {each.name for each in TABLE[callee]}
    assert not extra or callee == signatures.LLM_INIT, "the table has no row for it"


@pytest.mark.parametrize("callee", ATTRIBUTES)
def test_its_results_have_the_attributes_that_are_published(callee: str) -> None:
    assert not {each.name for each in TABLE[callee]} - ATTRIBUTES[callee]


def test_every_row_of_the_table_is_compared() -> None:
    assert CALLED.keys() | ATTRIBUTES.keys() == TABLE.keys()
    assert all(Signatures.of("1.3.0rc29").holds(callee) for callee in TABLE)


def test_an_argument_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid argument: tensor_paralel_size"):
        LLM("m", tensor_paralel_size=2)


# Its answers ---------------------------------------------------------------------------


def test_an_answer_grows_and_follows_from_its_prompt_and_seed() -> None:
    async def body() -> None:
        llm, seen = LLM("m"), list[list[int]]()
        async for output in ask(llm):
            seen.append([*output.outputs[0].token_ids])
        assert [len(each) for each in seen] == [*range(1, 9)]
        assert all(each == seen[-1][: len(each)] for each in seen), "all tokens so far"
        assert await tokens(llm, [*PROMPT, *seen[-1][:3]], max_tokens=5) == seen[-1][3:]
        drawn = [await tokens(llm, seed=seed, top_p=1.0, temperature=1.0) for seed in (1, 1, 2, None, None)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert drawn[3] == drawn[4], "without a seed they have the same one"

    run(body)


@pytest.mark.parametrize("greedy", [{"top_k": 1}, {"temperature": 0.0}, {"top_p": 0.0}, {}])
def test_the_likeliest_tokens_come_by_any_of_its_rules(greedy: dict[str, Any]) -> None:
    async def body() -> None:
        llm = LLM("m")
        assert await tokens(llm, **greedy) == await tokens(llm, top_k=1, temperature=3.0)

    run(body)


def test_a_stop_token_is_cut_off_unless_it_is_to_be_included() -> None:
    async def body() -> None:
        llm = LLM("m")
        whole = await tokens(llm)
        stop = next(place for place in range(1, 8) if whole[place] not in whole[:place])
        wanted: dict[str, Any] = {"stop_token_ids": [whole[stop]]}
        cut = await read(ask(llm, **wanted))
        kept = await read(ask(llm, include_stop_str_in_output=True, **wanted))
        assert (cut.token_ids, kept.token_ids) == (whole[:stop], whole[: stop + 1])
        assert (kept.finish_reason, kept.stop_reason) == ("stop", whole[stop])
        ended = await read(ask(llm, end_id=whole[stop]))
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (whole[: stop + 1], "stop", None)
        assert await tokens(llm, ignore_eos=True, **wanted) == whole, "stop tokens are ignored, too"
        assert len(await tokens(llm, end_id=whole[0], min_tokens=8)) == 8

    run(body)


def test_log_probabilities_have_the_drawn_token_beside_the_likeliest() -> None:
    async def body() -> None:
        llm = LLM("m")
        for count, least in ((0, 1), (1, 1), (3, 3)):
            output = await read(ask(llm, logprobs=count, temperature=2.0, top_p=1.0, seed=3))
            for token, place in zip(output.token_ids, output.logprobs, strict=True):
                assert isinstance(place, dict)
                assert token in place
                assert least <= len(place) <= count + 1
        scored = await read(ask(llm, prompt_logprobs=2))
        assert [token in place for token, place in zip(PROMPT[1:], scored.prompt_logprobs, strict=False)] == [True] * 19

    run(body)


def test_cached_blocks_are_found_again_by_the_same_salt_and_have_no_scores() -> None:
    async def body() -> None:
        llm = LLM(
            "m", kv_cache_config={"tokens_per_block": 4, "event_buffer_max_size": 64}, enable_iter_perf_stats=True
        )
        prompt = [*range(50, 63)]
        for salt, cached in ((None, 0), (None, 12), ("s", 0), ("s", 12)):
            output = ask(llm, prompt, prompt_logprobs=1, cache_salt=salt, max_tokens=6)
            await read(output)
            assert (output.cached_tokens, len(output.outputs[0].prompt_logprobs)) == (cached, 13 - cached)
        events = [event async for event in llm.get_kv_cache_events_async(timeout=0)]
        assert [event["event_id"] for event in events] == [*range(len(events))]
        assert events[0]["data"]["type"] == "created"
        stored = [event["data"] for event in events if event["data"]["type"] == "stored"]
        assert [len(block["tokens"]) for block in stored[0]["blocks"]] == [4, 4, 4]
        assert min(len(block["tokens"]) for data in stored for block in data["blocks"]) < 4, "a partial one at an end"
        stats = [stat async for stat in llm.get_stats_async(timeout=0)]
        assert stats[-1]["kvCacheStats"]["usedNumBlocks"] == 0 < max(s["kvCacheStats"]["usedNumBlocks"] for s in stats)
        assert llm.get_kv_cache_capacity()["tokensPerBlock"] == 4

    run(body)


def test_a_full_buffer_of_events_leaves_a_gap() -> None:
    async def body() -> None:
        llm = LLM("m", kv_cache_config={"tokens_per_block": 4, "event_buffer_max_size": 2})
        for start in range(20, 25):
            await tokens(llm, [*range(start, start + 13)])
        events = [event["event_id"] async for event in llm.get_kv_cache_events_async(timeout=0)]
        assert len(events) == 2
        assert events[0] > 2

    run(body)


# Pairs ---------------------------------------------------------------------------------


def test_a_decode_gets_all_tokens_from_the_state_of_a_prefill() -> None:
    async def body() -> None:
        prefill, decode, whole = LLM("m", **PAIR), LLM("m", **PAIR), LLM("m")
        output, state = await handed(prefill)
        assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 1)
        assert used(prefill) > 0, "it is held"
        assert await tokens(decode, disaggregated_params=state) == await tokens(whole)
        await until(partial(is_empty, prefill))
        with pytest.raises(RequestError, match="could not be fetched"):
            await tokens(decode, disaggregated_params=state)

    run(body)


def test_a_state_is_freed_by_an_abort_or_by_its_time() -> None:
    async def body() -> None:
        lease = {"backend": "UCX", "kv_transfer_timeout_ms": 20}
        for aborts, prefill in ((True, LLM("m", **PAIR)), (False, LLM("m", cache_transceiver_config=lease))):
            output, state = await handed(prefill)
            if aborts:
                output.abort()
            await until(partial(is_empty, prefill))
            with pytest.raises(RequestError):
                await tokens(LLM("m", **PAIR), disaggregated_params=state)

    run(body)


def test_a_prefill_whose_first_token_ends_the_answer_holds_nothing() -> None:
    async def body() -> None:
        prefill = LLM("m", **PAIR)
        first = (await tokens(LLM("m")))[0]
        output, state = await handed(prefill, end_id=first)
        assert (output.outputs[0].finish_reason, state.opaque_state) == ("stop", None)
        assert used(prefill) == 0

    run(body)


def test_an_abort_before_the_cache_has_come_leaks_its_blocks() -> None:
    async def body() -> None:
        prefill, decode = LLM("m", **PAIR), LLM("m", **PAIR)
        _, state = await handed(prefill)
        output = ask(decode, disaggregated_params=state)
        await until(lambda: used(decode) > 0)
        output.abort()
        assert (await read(output)).finish_reason == "cancelled"
        assert used(decode) > 0

    run(body)


def test_a_leg_needs_its_transceiver() -> None:
    async def body() -> None:
        with pytest.raises(ValueError, match="cache_transceiver_config"):
            ask(LLM("m"), disaggregated_params=DisaggregatedParams(request_type="context_only"))

    run(body)


# Its faults ----------------------------------------------------------------------------


async def cancelled(llm: LLM, fault: Fault | None = None) -> CompletionOutput:
    output = ask(llm, PROMPT if fault is None else prompt_of(fault), max_tokens=50)
    await anext(output)
    output.abort()
    assert output.aborted()
    return await read(output)


def test_an_abort_ends_an_answer_later_unless_it_is_ignored() -> None:
    async def body() -> None:
        llm = LLM("m")
        ended, ignored = await cancelled(llm), await cancelled(llm, Fault.ABORT_IGNORED)
        assert (ended.finish_reason, ignored.finish_reason, len(ignored.token_ids)) == ("cancelled", "length", 50)
        assert used(llm) == 0

    run(body)


@pytest.mark.parametrize("fault", [Fault.STUCK, Fault.TRANSFER_HANGS])
def test_nothing_ends_an_answer_that_is_stuck(fault: Fault) -> None:
    async def body() -> None:
        prefill, llm = LLM("m", **PAIR), LLM("m", **PAIR)
        state = None
        if fault is Fault.TRANSFER_HANGS:
            _, state = await handed(prefill)
        output = ask(llm, prompt_of(fault), disaggregated_params=state)
        output.abort()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(output), 0.05)
        await stop(llm)
        await stop(prefill)

    run(body)


async def stop(llm: LLM) -> None:
    llm.shutdown()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("fault", "finish"), [(Fault.CANCELLED, "cancelled"), (Fault.TIMEOUT, "timeout"), (Fault.LOGPROBS_AHEAD, "length")]
)
def test_an_answer_ends_by_its_fault(fault: Fault, finish: str) -> None:
    async def body() -> None:
        output = await read(ask(LLM("m"), prompt_of(fault), logprobs=1))
        assert output.finish_reason == finish
        assert len(output.logprobs) - len(output.token_ids) == (fault is Fault.LOGPROBS_AHEAD)

    run(body)


def test_log_probabilities_come_in_other_forms() -> None:
    async def body() -> None:
        llm = LLM("m")
        floats = (await read(ask(llm, prompt_of(Fault.LOGPROBS_FLOATS), logprobs=1))).logprobs
        missing = await read(ask(llm, prompt_of(Fault.LOGPROB_MISSING), logprobs=2))
        assert all(isinstance(each, float) for each in floats)
        assert not any(
            token in place
            for token, place in zip(missing.token_ids, missing.logprobs, strict=True)
            if isinstance(place, dict)
        )

    run(body)


def test_an_error_of_a_request_is_its_own_and_one_of_the_engine_is_that_of_all() -> None:
    async def body() -> None:
        llm = LLM("m")
        with pytest.raises(ValueError, match="refused"):
            ask(llm, prompt_of(Fault.REFUSED))
        with pytest.raises(RequestError):
            await tokens(llm, prompt_of(Fault.REQUEST_ERROR))
        assert is_healthy(llm)
        other = ask(llm, max_tokens=500)
        with pytest.raises(RuntimeError, match="CUDA error"):
            await tokens(llm, prompt_of(Fault.FATAL))
        with pytest.raises(RuntimeError, match="CUDA error"):
            await read(other)
        assert not is_healthy(llm)

    run(body)


def test_an_engine_that_is_shut_down_takes_no_requests() -> None:
    async def body() -> None:
        llm = LLM("m")
        with pytest.raises(RuntimeError, match="shutting down"):
            await tokens(llm, prompt_of(Fault.SHUT_DOWN))
        with pytest.raises(RuntimeError, match="shutting down"):
            ask(llm)
        llm.shutdown()

    run(body)


@pytest.mark.realtime
@pytest.mark.parametrize(("named", "code"), [({}, 0), ({"ESPALIER_FAKE_TRTLLM_FAULT": "DEATH"}, DEATH_CODE)])
def test_a_process_imports_it_by_its_own_name_and_may_die(named: dict[str, str], code: int) -> None:
    program = """
import asyncio
from tensorrt_llm import LLM, SamplingParams, __version__
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi import DisaggregatedParams, GuidedDecodingParams, KvCacheConfig
from tensorrt_llm.scheduling_params import SchedulingParams

async def main():
    async for output in LLM("m").generate_async([1, 2, 3], SamplingParams(end_id=-1, max_tokens=4), streaming=True):
        pass
    print(__version__, len(output.outputs[0].token_ids))

asyncio.run(main())
"""
    path = {"PYTHONPATH": str(Path(__file__).parent / "fake_tensorrt_llm")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **path, **named},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (code, [] if code else ["1.3.0rc29", "4"], "")


# Its operations ------------------------------------------------------------------------


def test_memory_is_released_only_where_that_is_configured() -> None:
    async def body() -> None:
        with pytest.raises(ValueError, match="sleep_config"):
            call(LLM("m"), "sleep")
        with pytest.raises(ValueError, match="weights"):
            call(LLM("m", sleep_config={}), "sleep", "weights")
        llm = LLM("m", tensor_parallel_size=2, sleep_config=_types.SleepConfig())
        call(llm, "sleep")
        with pytest.raises(RuntimeError, match="further"):
            call(llm, "sleep", "model_weights")
        with pytest.raises(RuntimeError, match="released"):
            ask(llm)
        call(llm, "wakeup")
        assert len(await tokens(llm)) == 8

    run(body)


def test_a_released_cache_still_names_its_blocks_and_answers_by_them_are_wrong() -> None:
    async def body() -> None:
        llm, prompt = LLM("m", sleep_config={}), [*range(80)]
        before = await tokens(llm, prompt)
        call(llm, "sleep")
        call(llm, "wakeup")
        again = ask(llm, prompt)
        answer = (await read(again)).token_ids
        assert again.cached_tokens == 64
        assert answer != before

    run(body)


def test_ranks_have_caches_of_their_own() -> None:
    async def body() -> None:
        llm = LLM(
            "m",
            tensor_parallel_size=2,
            enable_attention_dp=True,
            enable_iter_perf_stats=True,
            kv_cache_config={"event_buffer_max_size": 9},
        )
        for rank in (0, 1):
            strictly = SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False)
            output = ask(llm, [*range(40)], scheduling_params=strictly)
            await read(output)
            assert output.cached_tokens == 0
        assert {event["attention_dp_rank"] async for event in llm.get_kv_cache_events_async(timeout=0)} == {0, 1}
        stats = [stat async for stat in llm.get_stats_async(timeout=0)]
        assert {stat["attentionDpRank"] for stat in stats} == {0, 1}
        memory = [stat["kvCacheStats"] for stat in stats]
        assert memory[::2] == memory[1::2], "those of all ranks are the first one's"
        ranks = {rank for rank in (0, 1) for _ in range(2) if await found_at(llm) == rank}
        assert ranks == {0, 1}, "what is not pinned goes to any rank"

    run(body)


def test_what_is_not_enabled_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        llm = LLM("m")
        two = GuidedDecodingParams(json="{}", regex="a")
        for words, refused in (
            ("guided_decoding_backend", partial(ask, llm, guided_decoding=GuidedDecodingParams(regex="a"))),
            ("must have 512 values", partial(ask, llm, embedding_bias=[0.0] * (VOCABULARY - 1))),
            ("priority must be", partial(ask, llm, priority=1.5)),
            ("tokenizer is required", partial(ask, llm, end_id=None)),
            ("exceeds max_seq_len", partial(ask, llm, [1] * 4096)),
            ("does not exist", partial(LoRARequest, "gone", 1, str(tmp_path / "gone"))),
            ("Only one guide", partial(params, guided_decoding=two)),
        ):
            with pytest.raises(ValueError, match=words):
                refused()

    run(body)


def test_an_adapter_is_found_by_its_number_alone_and_is_left_out_without_a_configuration(tmp_path: Path) -> None:
    one, two = (LoRARequest(f"a{seed}", seed, str(write_adapter(tmp_path / f"a{seed}", seed))) for seed in (1, 2))

    async def body() -> None:
        llm = LLM("m", lora_config={"lora_target_modules": ["attn_q"], "max_loras": 1})
        plain, first, second = (
            await tokens(llm),
            await tokens(llm, lora_request=one),
            await tokens(llm, lora_request=two),
        )
        assert first not in (plain, second)
        assert second != plain
        stale = LoRARequest("a2", 1, two.lora_path)
        assert await tokens(llm, lora_request=stale) == first, "nothing was read again"
        assert await tokens(LLM("m"), lora_request=one) == plain
        for why, wrong in (("No such file", LoRARequest("none", 3, str(tmp_path))), ("Invalid low_rank", one)):
            with pytest.raises(RequestError, match=f"Failed to load LoRA adapter: .*{why}"):
                await tokens(LLM("m", lora_config={**LORA, "max_lora_rank": 2}), lora_request=wrong)
        assert await tokens(llm, lora_request=two) == second
        with pytest.raises(AssertionError, match="at least one lora target module"):
            LLM("m", lora_config={"max_loras": 1})

    run(body)


def test_adapters_beyond_the_memory_of_the_gpu_replace_one_another_and_share_no_block(tmp_path: Path) -> None:
    loras = [LoRARequest(f"a{seed}", seed, str(write_adapter(tmp_path / f"a{seed}", seed))) for seed in (1, 2, 3)]

    async def body() -> None:
        llm = LLM("m", lora_config={**LORA, "max_loras": 2})
        prompt = [*range(100)]
        expected = [await tokens(llm, prompt, lora_request=lora) for lora in loras]
        assert len({str(each) for each in expected}) == 3
        answers = [ask(llm, prompt, lora_request=lora) for lora in (*loras, *loras)]
        assert [(await read(each)).token_ids for each in answers] == expected * 2
        assert all(each.cached_tokens for each in answers)
        executor = llm._executor  # noqa: SLF001
        assert executor is not None
        assert executor.adapters is not None
        assert executor.adapters.evictions > 1
        assert len(executor.adapters.device) == 2

    run(body)


def test_the_adapter_of_a_fetched_request_is_never_loaded_which_breaks_the_engine(tmp_path: Path) -> None:
    lora = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", 1)))

    async def body() -> None:
        prefill, decode = (LLM("m", lora_config=LORA, **PAIR) for _ in range(2))
        output, state = await handed(prefill, lora_request=lora)
        with pytest.raises(RuntimeError, match="copyTask ensure batch"):
            await tokens(decode, disaggregated_params=state, lora_request=lora)
        assert not is_healthy(decode)
        output.abort()

    run(body)


TEXT = "<|vision_start|><|image_pad|><|vision_end|>what?"


def embedded(encoder: MultimodalEncoder, picture: Image.Image) -> torch.Tensor:
    """Return the embeddings of an image by an encoder."""
    inputs = {"prompt": TEXT, "multi_modal_data": {"image": [picture]}, "mm_processor_kwargs": {}}
    handed = encoder.generate_async(inputs).result().disaggregated_params
    assert handed is not None
    assert handed.multimodal_embedding_handles is not None
    (handle,) = handed.multimodal_embedding_handles
    return SharedTensorContainer.from_dict(handle).get_local_view()


def test_an_encoder_returns_handles_that_are_opened_once(tmp_path: Path) -> None:
    encoder = MultimodalEncoder(image_model(tmp_path, "qwen2_5_vl"), max_batch_size=4)
    one, other = (Image.new("RGB", (140, 112), colour) for colour in ("red", "blue"))
    rows = embedded(encoder, one)
    assert (tuple(rows.shape), rows.dtype) == ((20, 128), torch.bfloat16)
    assert torch.equal(rows, embedded(encoder, one))
    assert not torch.equal(rows, embedded(encoder, other))
    handle = SharedTensorContainer.from_tensor(rows).dump_to_dict()
    SharedTensorContainer.from_dict(handle).get_local_view()
    with pytest.raises(KeyError):
        SharedTensorContainer.from_dict(handle).get_local_view()


def test_a_model_with_images_needs_positions_and_embeddings_need_a_text(tmp_path: Path) -> None:
    async def body() -> None:
        llm = LLM(image_model(tmp_path, "qwen2_5_vl"))
        with pytest.raises(KeyError, match="mrope_position_ids"):
            ask(llm)
        shared: dict[str, Any] = {"multimodal_embedding_handles": [{"tensor_size": [20, 128]}]}
        for inputs, words in (({"prompt_token_ids": PROMPT}, "Text prompt is required"), ({"prompt": TEXT}, "guess")):
            with pytest.raises(ValueError, match=words):
                llm.preprocess(inputs, params(), DisaggregatedParams(**shared))
        older = LLM(image_model(tmp_path, "qwen2_vl"))
        with pytest.raises(ValueError, match="not supported for this model"):
            older.preprocess({"prompt": TEXT}, params(), DisaggregatedParams(**shared))

    run(body)
