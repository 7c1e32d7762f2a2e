"""The warm-up requests of an engine before it is ready, so that no client's request is slowed by it.

The first request of each kind compiles kernels and allocates memory for later ones: for a prompt, a decoded token, a
sampled one, a prompt with a cached beginning, a grammar, and a picture. A prefill or a decode has no partner yet: for
it SGLang has a transfer that moves nothing, chosen by an address.
"""

from __future__ import annotations

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.sglang.host.kv import prefix_cache
from protocol.messages.engine import EngineInfo
from protocol.trace import UNSAMPLED

PROMPT_TOKENS = 32
ANSWER_TOKENS = 4
FLUSH_WITHIN_S = 10.0

GREEDY: dict[str, object] = {"temperature": 0.0}
SAMPLED: dict[str, object] = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "frequency_penalty": 0.1}
GRAMMAR: dict[str, object] = {"temperature": 0.0, "regex": "[0-9]+"}


async def warm_up(
    manager: TokenizerManager, info: EngineInfo, mode: str, picture: MultimodalProcessorOutput | None = None
) -> None:
    """Answer some short requests on each rank, and drop them from the cache.

    `mode` is SGLang's disaggregation mode, "null" for an engine that computes both legs. `picture` is the input of a
    prompt with a picture, for an engine that takes some; it can be given to one rank only. Raises `RuntimeError` if a
    request is not answered in full.
    """
    # A decode without a KV cache from a prefill begins with an arbitrary token, which a grammar would refuse.
    kinds = [GREEDY, SAMPLED, *([GRAMMAR] if info.grammars and mode != "decode" else [])]
    half = max(1, info.request_tokens_max // 2)
    prompt = [index % info.vocabulary_size for index in range(min(PROMPT_TOKENS, half))]
    requests = [(rank, prompt, None, sampling) for sampling in kinds for rank in range(info.data_parallel)]
    if picture is not None:
        requests.append((0, picture.input_ids, picture, {**GREEDY, "max_new_tokens": 1}))
    for number, (rank, tokens, media, sampling) in enumerate(requests):
        room = number * info.data_parallel + rank
        bootstrap = {} if mode == "null" else {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": room}
        request = GenerateReqInput(
            input_ids=tokens,
            image_data=None if media is None else [media],
            sampling_params={"max_new_tokens": min(ANSWER_TOKENS, half), "ignore_eos": True, **sampling},
            rid=f"{number:032x}",
            routed_dp_rank=rank,
            stream=True,
            external_trace_header=UNSAMPLED,
            **bootstrap,
        )
        reason, drawn = None, 0
        async for out in manager.generate_request(request, None):
            reason, drawn = out["meta_info"]["finish_reason"], drawn + len(out["output_ids"])
        # Without memory for a token SGLang ends a request without one, as if it were complete.
        if reason is None or reason["type"] == "abort" or not drawn:
            why = None if reason is None else reason.get("message")
            raise RuntimeError(f"its own first request was not answered: {why or 'it ended without a token'}")
    if (why_not := await prefix_cache.flush(manager, FLUSH_WITHIN_S)) is not None:
        raise RuntimeError(f"its first requests could not be forgotten: {why_not}")
