"""SGLang's own settings in `cluster.toml`: those that contradict a key of ours, or break the host, are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from actors.engines.sglang import setting_rules
from actors.engines.sglang.arguments import CHOICES, TYPES
from actors.engines.sglang.boot_message import (
    CPU_ARGUMENTS,
    DEFAULT_ARGUMENTS,
    METRICS_FOLDER,
    PROFILES_FOLDER,
    RECORDS_FOLDER,
    build,
)
from actors.engines.sglang.spec import SglangSpec
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.engines.sglang.children import spec_of
from supervisor.engines.sglang.section import SglangSection

FILE = """\
[model.tiny]
path = "."
[engine.tiny-0]
model = "tiny"
device = "cpu"
kv_tokens_max = 4096
[engine.tiny-0.settings]
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Cluster]:
    def read(*settings: str) -> Cluster:
        (tmp_path / "cluster.toml").write_text(FILE + "\n".join(settings))
        return read_cluster(tmp_path / "cluster.toml")

    return read


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("is_embedding = true", "settings.is_embedding: is given by task"),
        ("dp_size = 2", "settings.dp_size: is given by data_parallel"),
        ("enable_dp_attention = true", "settings.enable_dp_attention: cannot be set: the router chooses the rank"),
        ('disaggregation_mode = "prefill"', "settings.disaggregation_mode: is given by leg"),
        ("skip_tokenizer_init = true", "settings.skip_tokenizer_init: cannot be set: the host needs"),
        ("kv_events_config = '{}'", "settings.kv_events_config: is given by [engine.NAME.events]"),
        ("port = 1", "settings.port: cannot be set: it is for SGLang's own server"),
        ("enable_multimodal = false", "settings.enable_multimodal: is given by vision"),
        (
            "limit_mm_data_per_request = '{}'",
            "settings.limit_mm_data_per_request: cannot be set: images and videos are",
        ),
        ("tp_size = 4", "settings.tp_size: is given by tensor_parallel"),
        ("incremental_streaming_output = false", "settings.incremental_streaming_output: cannot be set"),
        ("log_requests = true", "settings.log_requests: cannot be set: prompts and answers are written nowhere"),
        ("nope = 1", "settings.nope: is no argument of SGLang 0.5.23"),
        ("disable_cuda_grap = true", "settings.disable_cuda_grap: is no argument of SGLang 0.5.23; the nearest is dis"),
        ("disable_cuda_graph = 1", "settings.disable_cuda_graph: must be a boolean, got 1"),
        ("pp_size = true", "settings.pp_size: must be an integer, got True"),
        ("dtype = 16", "settings.dtype: must be one of auto, half, float16, bfloat16, float, float32, got 16"),
        ('dtype = "fp16"', "settings.dtype: must be one of auto, half, float16, bfloat16, float, float32, got 'fp16'"),
        ("enable_eplb = true", "settings.enable_eplb: is given by [engine.NAME.experts]"),
        ("revision = 16", "settings.revision: is given by the model's path"),
        ("max_lora_chunk_size = 17", "settings.max_lora_chunk_size: must be one of 16, 32, 64, 128, got 17"),
        ("model_checksum = 16", "settings.model_checksum: must be a string, got 16"),
        ('schedule_conservativeness = "high"', "settings.schedule_conservativeness: must be a number, got 'high'"),
        ("cuda_graph_bs_decode = 8", "settings.cuda_graph_bs_decode: must be a list, got 8"),
        ('grammar_backend = "outlines"', "settings.grammar_backend: must be xgrammar or none: no limit on"),
        ('load_format = "saftensors"', "settings.load_format: must be one of auto, pt, safetensors, instanttensor, np"),
        ('json_model_override_args = "{"', "settings.json_model_override_args: must be an object of JSON, got '{'"),
        ('deepep_mode = "fast"', "settings.deepep_mode: must be one of auto, normal, low_latency"),
    ],
)
def test_a_setting_that_would_lie_is_a_mistake_with_its_line(
    line: str, mistake: str, read: Callable[..., Cluster]
) -> None:
    with pytest.raises(StartFailed, match=re.escape(f"line 8: engine.tiny-0.{mistake}")):
        read(line)


@pytest.mark.parametrize("backend", ["xgrammar", "none"])
def test_a_grammar_backend_whose_grammars_are_bounded_is_taken(backend: str, read: Callable[..., Cluster]) -> None:
    assert read(f'grammar_backend = "{backend}"').engines_of(SglangSection)["tiny-0"].settings == {
        "grammar_backend": backend
    }


def test_settings_that_change_how_sglang_computes_are_taken(read: Callable[..., Cluster]) -> None:
    lines: tuple[str, ...] = (
        'attention_backend = "fa3"',
        'dtype = "float32"',
        "schedule_conservativeness = 1",
        'trace_modules = "request"',
    )
    lines += ("cuda_graph_bs_decode = [1, 2]", 'deepep_mode = "auto"', "load_snapshot_publish_interval = 1")
    lines += ('kv_cache_dtype = "fp8_e5m2"',)
    assert len(read(*lines).engines_of(SglangSection)["tiny-0"].settings) == len(lines)


def test_only_engines_that_export_spans_have_the_arguments_for_it() -> None:
    silent = SglangSpec("e", "/m", "cpu", 4, 4096)
    traced = evolve(silent, traces="http://[::1]:4318/v1/traces")
    names = {"enable_trace", "otlp_traces_endpoint", "otlp_service_name"}
    assert not names & build(silent, "folder").arguments.keys()
    assert names <= build(traced, "folder").arguments.keys()
    assert not names & build(evolve(traced, checks_grammars=True), "folder").arguments.keys()
    of_level = [build(spec, "folder").environment.get("SGLANG_TRACE_LEVEL") for spec in (silent, traced)]
    assert of_level == [None, "2"]
    own = evolve(traced, environment={"SGLANG_TRACE_LEVEL": "3"})
    assert build(own, "folder").environment["SGLANG_TRACE_LEVEL"] == "3"


@pytest.mark.parametrize("line", ["enable_trace = true", 'otlp_traces_endpoint = "http://a"'])
def test_sglangs_own_arguments_for_spans_name_the_key_in_their_place(line: str, read: Callable[..., Cluster]) -> None:
    with pytest.raises(StartFailed, match=r"is given by tracing\.engines"):
        read(line)


def test_every_rule_is_about_an_argument_that_there_is() -> None:
    assert setting_rules.REFUSED.keys() <= TYPES.keys()
    assert CHOICES.keys() <= TYPES.keys()
    assert CHOICES.keys() >= {name for name, kind in TYPES.items() if kind == "choice"}


def arguments(device: str, leg: Leg) -> dict[str, Any]:
    """Return what a host is started with."""
    spec = SglangSpec(
        "e", "/m", device, 4, 4096, 512, 16, 1, 0.5, 64, leg, bootstrap_port=9000, nodes=2, dist_init_address="a:1"
    )
    return build(spec, "folder").arguments


@pytest.mark.parametrize("leg", list(Leg))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_host_is_started_with_has_the_types_of_sglangs_arguments(leg: Leg, device: str) -> None:
    given = arguments(device, leg)
    if leg is not Leg.ENCODE:  # which has neither requests nor KV memory
        assert DEFAULT_ARGUMENTS.keys() <= given.keys()
        assert device != "cpu" or CPU_ARGUMENTS.keys() <= given.keys()
    own = {name: setting_rules.setting_mistake(name, value) for name, value in given.items()}
    assert not [why for why in own.values() if why is not None and why.startswith(("must", "is no"))]


def test_all_that_the_host_decides_from_keys_of_ours_is_refused_in_settings() -> None:
    tunable = {"sleep_on_idle", "constrained_json_disable_any_whitespace", "log_level"}
    assert arguments("cuda", Leg.PREFILL).keys() - tunable <= setting_rules.REFUSED.keys()


def test_an_engine_has_as_many_ranks_as_its_key_says_each_with_sockets_for_its_events() -> None:
    one = SglangSpec("e", "/m", "cpu", 4, 4096, publishes=True)
    assert "dp_size" not in build(one, "/f").arguments
    assert [each.endpoint for each in build(one, "/f").events] == ["ipc:///f/events.inproc"]
    two = evolve(one, data_parallel=2)
    boot = build(two, "/f")
    assert boot.arguments["dp_size"] == 2
    assert [(each.endpoint, each.replay_endpoint) for each in boot.events] == [
        ("ipc:///f/events.inproc", "ipc:///f/replay.inproc"),
        ("ipc:///f/events.inproc_dp1", "ipc:///f/replay.inproc_dp1"),
    ]
    seen = build(evolve(two, events_address="0.0.0.0:5557", events_replay_address="127.0.0.1:5600"), "/f")
    assert [(each.endpoint, each.replay_endpoint) for each in seen.events] == [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5600"),
        ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5601"),
    ]


def test_an_engine_with_metrics_keeps_them_in_its_own_folder_whatever_the_environment_says() -> None:
    without = SglangSpec("e", "/m", "cpu", 4, 4096, environment={METRICS_FOLDER: "/elsewhere"})
    assert "enable_metrics" not in build(without, "folder").arguments
    boot = build(evolve(without, metrics=True), "folder")
    assert (boot.arguments["enable_metrics"], boot.environment[METRICS_FOLDER]) == (True, "folder")


def test_what_operations_leave_lies_in_the_folder_of_the_engine_whatever_its_environment_says() -> None:
    named = dict.fromkeys((PROFILES_FOLDER, RECORDS_FOLDER), "/elsewhere")
    boot = build(SglangSpec("e", "/m", "cpu", 4, 4096, environment=named), "folder", "/logs/e.files")
    assert {boot.environment[name] for name in named} == {boot.files} == {"/logs/e.files"}


def test_metrics_are_a_key_of_sglangs_engines_that_are_no_encoders(read: Callable[..., Cluster]) -> None:
    assert not read().engines_of(SglangSection)["tiny-0"].metrics
    assert not spec_of(read(), "tiny-0").metrics
    on = read("[engine.tiny-1]", 'model = "tiny"', 'device = "cpu"', "kv_tokens_max = 4096", "metrics = true")
    assert spec_of(on, "tiny-1").metrics
    encoder = ("[engine.eyes]", 'model = "tiny"', 'device = "cpu"', 'leg = "encode"', "metrics = true")
    with pytest.raises(StartFailed, match=r"engine\.eyes\.metrics: is for engines that compute tokens"):
        read(*encoder)
    simulated = ("[engine.fake]", 'kind = "simulated"', 'model = "tiny"', "kv_tokens_max = 4096", "metrics = true")
    with pytest.raises(StartFailed, match=r"engine\.fake\.metrics"):
        read(*simulated)
