"""Names of the arguments of TensorRT-LLM's `LLM`: some are given by keys, some cannot be set, and some do not exist."""

from __future__ import annotations

import pytest

from actors.engines.trtllm.setting_rules import NAMES, REFUSED, setting_mistake
from actors.engines.trtllm.signatures import LLM_INIT, TABLE


@pytest.mark.parametrize(
    "name",
    ["dtype", "attn_backend", "kv_cache_config.dtype", "moe_config.backend", "lora_config.overlap_lora_and_base"],
)
def test_an_operator_may_set_how_it_computes(name: str) -> None:
    assert setting_mistake(name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("backend", "PyTorch backend alone, and no other, such as _autodeploy"),
        ("max_batch_size", "is given by slots"),
        ("kv_cache_config.max_tokens", "is given by kv_tokens_max"),
        ("lora_config.max_lora_rank", "is given by [engine.NAME.adapters]"),
        ("peft_cache_config.host_cache_size", "is given by [engine.NAME.adapters]"),
        ("lora_config", 'write "lora_config.FIELD"'),
        ("kv_cache_config", 'has fields of its own: write "kv_cache_config.FIELD"'),
        ("dtype.x", "is no argument"),
        ("atn_backend", "is no argument of TensorRT-LLM 1.3.0rc29's LLM; the nearest is attn_backend"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_reason(name: str, why: str) -> None:
    assert why in (setting_mistake(name) or "")


def test_every_argument_of_the_published_signatures_has_a_name_here() -> None:
    assert {each.name for each in TABLE[LLM_INIT]} <= NAMES
    assert {name.partition(".")[0] for name in REFUSED} <= NAMES
