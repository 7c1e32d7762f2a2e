"""`[engine.NAME]` of a TensorRT-LLM engine: its mistakes, by name, and its host's description."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from supervisor.engines.kinds import mistakes_here, read_cluster
from supervisor.engines.trtllm.children import spec_of
from tests.rig.cluster_files import MODEL

FILE = f"""
[gateway]
port = 0
{MODEL}[engine.e]
model = "tiny"
kind = "trtllm"
kv_tokens_max = 4096
"""


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ('leg = "encode"', "engine.e.kv_tokens_max: is for engines that compute tokens, and engine.e.leg is encode"),
        ('leg = "encode"\ntransfer = "UCX"', "engine.e.transfer: is for engines that compute tokens"),
        ('leg = "encode"\nreleases_memory = true', "engine.e.releases_memory: is for engines that compute tokens"),
        ("tensor_parallel = 4\ndata_parallel = 2", "engine.e.data_parallel: must be 1 or tensor_parallel, which is 4"),
        ("page_size = 24", "engine.e.page_size: must be a power of two, got 24"),
        ('python = " "', "engine.e.python: is empty"),
        ('settings.backend = "_autodeploy"', "engine.e.settings.backend: cannot be set: the host runs"),
        ('settings."kv_cache_config.max_tokens" = 5', "is given by kv_tokens_max"),
        ("max_num_tokens = 5", "engine.e.max_num_tokens: is not a key here; did you mean prefill_chunk?"),
        ('attn_backend = "FLASHINFER"', "it is an argument of TensorRT-LLM: write it in [engine.NAME.settings]"),
        ("enable_attention_dp = true", "what TensorRT-LLM has by this name is given by data_parallel"),
        ("settings.sleep_config = 1", "engine.e.settings.sleep_config: is given by releases_memory"),
        ('leg = "prefill"\nreleases_memory = true', "engine.e.releases_memory: needs leg = "),
        ('environment."A=B" = "c"', "is no name of a variable"),
        ('transfer = "telepathy"', "engine.e.transfer"),
    ],
)
def test_a_mistake_is_reported_by_its_name(written: Callable[[str], Path], keys: str, why: str) -> None:
    with pytest.raises(StartFailed) as caught:
        read_cluster(written(f"{FILE}{keys}\n"))
    assert why in str(caught.value)


def test_an_interpreter_that_is_not_there_is_a_mistake_on_its_host_alone(written: Callable[[str], Path]) -> None:
    cluster = read_cluster(written(f'{FILE}python = "/nowhere/python"\n'))
    found = [(each.path, each.message) for each in mistakes_here(cluster, ["main"], {})]
    assert found == [("engine.e.python", "no program is there on this host: /nowhere/python")]
    assert not [*mistakes_here(read_cluster(written(FILE)), ["main"], {})]


def test_ranks_are_those_of_tensor_parallelism(written: Callable[[str], Path]) -> None:
    spec = spec_of(read_cluster(written(f"{FILE}tensor_parallel = 2\ndata_parallel = 2\n")), "e")
    assert (spec.tensor_parallel, spec.data_parallel) == (2, 2)


def test_the_keys_reach_the_description_of_the_host(written: Callable[[str], Path]) -> None:
    keys = 'slots = 4\ncontext_max = 512\nleg = "both"\nreleases_memory = true\nevents.publish = true\nsettings.dtype = "bfloat16"\n'
    spec = spec_of(read_cluster(written(FILE + keys)), "e")
    assert (spec.slots, spec.context_max, spec.kv_tokens_max, spec.page_size) == (4, 512, 4096, 32)
    assert (spec.publishes, spec.releases_memory, spec.settings) == (True, True, {"dtype": "bfloat16"})


def test_with_an_encoder_of_its_model_an_engine_takes_embeddings(written: Callable[[str], Path]) -> None:
    encoder = '[engine.eyes]\nmodel = "tiny"\nkind = "trtllm"\nleg = "encode"\nencoder.batch_max = 3\n'
    assert spec_of(read_cluster(written(FILE)), "e").has_tower
    cluster = read_cluster(written(FILE + encoder))
    assert not spec_of(cluster, "e").has_tower
    spec = spec_of(cluster, "eyes")
    assert (spec.leg, spec.batch_max) == (Leg.ENCODE, 3)
