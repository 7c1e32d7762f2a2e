"""Prefills and decodes of one file that cannot meet are mistakes, before anything starts."""

from __future__ import annotations

import pytest

from supervisor.engines.kinds import read_cluster
from tests.rig.cluster_files import MODEL
from tests.supervisor.config.test_load import Written, mistakes

PREFILL = """[engine.p]
model = "tiny"
device = "cpu"
kv_tokens_max = 4096
leg = "prefill"
bootstrap_port = 9000
"""
DECODE = (
    PREFILL.replace("[engine.p]", "[engine.d]").replace('"prefill"', '"decode"').replace("bootstrap_port = 9000\n", "")
)
OTHER_NODE = '[cluster]\nname = "grove"\njoin = ["far:7401"]\n[node.main]\nhost = "near"\nlisten = "near:7400"\n'


@pytest.mark.parametrize(
    ("prefill", "decode", "sentence"),
    [
        ("page_size = 32", "", "its page_size is 32, and that of d is 16"),
        ('transfer = "nixl"', "", "its transfer is nixl, and that of d is mooncake_tcp"),
        ("", 'device = "cuda"', "its device is cpu, and that of d is cuda"),
        (
            'settings.kv_cache_dtype = "fp8_e5m2"',
            'settings.kv_cache_dtype = "bfloat16"',
            "its kv_cache_dtype is fp8_e5m2, and that of d is bfloat16",
        ),
        ("", 'kind = "simulated"', "its kind is sglang, and that of d is simulated"),
    ],
)
def test_legs_that_differ_are_a_mistake_at_the_prefill(
    written: Written, prefill: str, decode: str, sentence: str
) -> None:
    legs = [
        (text.replace('device = "cpu"\n', "") if "device" in keys or "simulated" in keys else text) + f"{keys}\n"
        for text, keys in ((PREFILL, prefill), (DECODE, decode))
    ]
    ((_, mistake),) = mistakes(written(MODEL + "".join(legs)))
    assert mistake == f"engine.p: can meet no decode: {sentence}"


def test_a_leg_beside_a_pair_that_agrees_is_a_mistake_if_it_has_no_partner(written: Written) -> None:
    other = DECODE.replace("[engine.d]", "[engine.d32]") + "page_size = 32\n"
    ((_, mistake),) = mistakes(written(MODEL + PREFILL + DECODE + other))
    assert mistake == "engine.d32: can meet no prefill: its page_size is 32, and that of p is 16"
    both = PREFILL.replace("[engine.p]", "[engine.p32]").replace("9000", "9100") + "page_size = 32\n"
    assert len(read_cluster(written(MODEL + PREFILL + DECODE + both + other)).engine) == 4


def test_a_file_that_joins_others_may_have_legs_that_meet_engines_elsewhere(written: Written) -> None:
    file = written(MODEL + OTHER_NODE + PREFILL + "page_size = 32\n" + DECODE)
    assert [*read_cluster(file).engine] == ["p", "d"]


@pytest.mark.parametrize("join", ["", OTHER_NODE])
def test_an_order_in_which_a_kind_has_no_pairs_is_a_mistake_at_the_model(written: Written, join: str) -> None:
    engine = '[engine.{}]\nmodel = "tiny"\nkind = "trtllm"\nkv_tokens_max = 4096\nleg = "{}"\n'
    pair = engine.format("p", "prefill") + engine.format("d", "decode")
    ((_, mistake),) = mistakes(written(join + MODEL + 'hand_off = "concurrent"\n' + pair))
    assert mistake == "model.tiny.hand_off: pairs of kind trtllm are sequential alone, and engine p is of that kind"
    for order in ("", 'hand_off = "sequential"\n'):
        assert [*read_cluster(written(join + MODEL + order + pair)).engine] == ["p", "d"]
    whole = MODEL + 'hand_off = "concurrent"\n' + engine.format("whole", "both")
    assert [*read_cluster(written(join + whole)).engine] == ["whole"]
