"""`[engine.NAME.adapters]` of a TensorRT-LLM engine: what contradicts it, and what the engine cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engines.trtllm.adapter_arguments import adapter_bounds
from protocol.errors import StartFailed
from supervisor.engines.kinds import mistakes_here, read_cluster
from supervisor.engines.trtllm import adapters_section
from supervisor.engines.trtllm.adapters_section import TrtllmAdapters
from supervisor.engines.trtllm.children import spec_of
from tests.rig.adapters import write_adapter
from tests.rig.cluster_files import MODEL

FILE = f"""
[gateway]
port = 0
{MODEL}[engine.e]
model = "tiny"
kind = "trtllm"
kv_tokens_max = 4096
adapters.max_rank = 8
"""
USUAL = TrtllmAdapters(max_rank=8)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            'adapters.target_modules = ["attn_q"]',
            "engine.e.adapters.target_modules: names attn_q; expected all or some of",
        ),
        ('adapters.target_modules = ["all", "q_proj"]', "engine.e.adapters.target_modules: names all and others"),
        ('adapters.load."a b" = "a"', "the name of an adapter must be"),
        ("adapters.active_max = 3", "engine.e.adapters.active_max: is not a key here"),
        ('leg = "decode"', "engine.e.adapters: an engine of a pair takes no adapters"),
        ('leg = "prefill"', "engine.e.adapters: an engine of a pair takes no adapters"),
        ("tensor_parallel = 2\ndata_parallel = 2", "engine.e.adapters: an engine with several ranks takes no adapters"),
        ('settings."lora_config.max_loras" = 2', "is given by [engine.NAME.adapters]"),
        ("settings.enable_lora = true", "is given by [engine.NAME.adapters]"),
    ],
)
def test_a_mistake_is_reported_by_its_name(written: Callable[[str], Path], keys: str, why: str) -> None:
    with pytest.raises(StartFailed) as caught:
        read_cluster(written(f"{FILE}{keys}\n"))
    assert why in str(caught.value)


def test_an_engine_with_several_ranks_takes_none() -> None:
    (mistake,) = adapters_section.mistakes(USUAL, (), "engine.e", in_pair=False, ranks=2)
    assert (mistake.path, "untested" in mistake.message) == ("engine.e.adapters", True)


def test_settings_about_adapters_mean_nothing_without_the_table() -> None:
    names = ("lora_config.overlap_lora_and_base", "dtype")
    (mistake,) = adapters_section.mistakes(None, names, "engine.e", in_pair=True, ranks=2)
    assert "lora_config.overlap_lora_and_base" in mistake.path
    assert not [*adapters_section.mistakes(USUAL, names, "engine.e", in_pair=False, ranks=1)]


def test_the_table_reaches_the_description_of_the_host_and_its_files_are_checked_there(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    good, bad = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "bad", rank=16)
    keys = f'adapters.loaded_max = 3\nadapters.target_modules = ["q_proj"]\nadapters.load.a = "{good}"\n'
    limits = spec_of(read_cluster(written(FILE + keys)), "e").adapters
    assert limits is not None
    assert (limits.bounds, limits.loaded_max) == (adapter_bounds(8, ("q_proj",)), 3)
    assert limits.folders == {"a": str(good)}
    cluster = read_cluster(written(f'{FILE}adapters.load = {{ a = "{good}", b = "{bad}" }}\n'))
    (found,) = mistakes_here(cluster, ["main"], {})
    assert (found.path, "its rank is 16" in found.message) == ("engine.e.adapters.load.b", True)
