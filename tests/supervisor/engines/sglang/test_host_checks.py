"""An engine that asks for more than its model or this host has is a mistake at the line of its key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from protocol.errors import StartFailed
from supervisor.engines.kinds import read_cluster
from supervisor.engines.sglang import host_checks
from supervisor.engines.sglang.host_checks import context_limit, experts_of
from supervisor.engines.sglang.spawn import host_environment
from supervisor.node.reload import file_checks
from tests.rig.cluster_files import TINY
from tests.supervisor.config.test_load import GOOD

Written = Callable[[str], Path]
CUDA = GOOD.replace('"cpu"', '"cuda"')
BASE = {key: value for key, value in json.loads((TINY / "config.json").read_text()).items() if "rope" not in key}
ORIGINAL = {"original_max_position_embeddings": 1024}
CONFIGS: Mapping[str, tuple[Mapping[str, object], int | None]] = {  # what is added to a configuration, and its limit
    "plain": ({}, 4096),
    "another key": ({"seq_length": 999}, 999),
    "nulls": ({"rope_scaling": None, "max_sequence_length": None}, 4096),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    "a fraction": ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, 10240),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}}, 4096),
    "yarn alone": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 4096),
    "llama3": (
        {
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | ORIGINAL
        },
        4096,
    ),
    "parameters": ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 16384),
}
READ = """
import espalier_sglang_cpu; espalier_sglang_cpu.prepare()
import json, sys
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_hf_text_config
read = lambda folder: get_context_length(get_hf_text_config(get_config(folder, trust_remote_code=False)))
print(json.dumps({name: read(name) for name in sys.argv[1:]}))
"""


def folders(path: Path) -> dict[str, Path]:
    """Return a folder for each configuration."""
    for name, (added, _) in CONFIGS.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps({**BASE, **added}))
    return {name: path / name for name in CONFIGS}


def test_the_limit_of_a_model_is_in_its_configuration(tmp_path: Path) -> None:
    limits = {name: context_limit(folder) for name, folder in folders(tmp_path).items()}
    assert limits == {name: limit for name, (_, limit) in CONFIGS.items()}
    assert context_limit(TINY.with_name("tiny-vision")) == 4096
    assert context_limit(tmp_path / "plain", '{"max_position_embeddings": 8192}') == 8192
    huge = '{"max_position_embeddings": 1e308, "rope_scaling": {"type": "linear", "factor": 1e308}}'
    for text in ("{}", "[]", "nonsense", '{"max_position_embeddings": "many"}', "[" * 200_000, huge):
        (tmp_path / "config.json").write_text(text)
        assert context_limit(tmp_path) is None


@pytest.mark.engine
@pytest.mark.nightly
def test_the_limit_of_a_model_is_that_of_the_installed_sglang(tmp_path: Path) -> None:
    paths = [*map(str, folders(tmp_path).values()), str(TINY.with_name("tiny-vision"))]
    environment = host_environment(os.environ, "cpu")
    done = subprocess.run(
        [sys.executable, "-c", READ, *paths], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {path: context_limit(Path(path)) for path in paths}


def report(file: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return the report of the mistakes in a file, empty if there are none."""
    try:
        read_cluster(file, (), partial(file_checks.mistakes, environment=environment or {}))
    except StartFailed as error:
        return str(error)
    return ""


def test_a_context_beyond_the_models_is_a_mistake_unless_sglang_may_go_beyond(written: Written) -> None:
    file = written(f"{GOOD}context_max = 4097\n")
    assert report(file).splitlines()[1:] == [
        (
            f"  line 9: engine.tiny-0.context_max: is 4097, and the model's own limit is 4096, by {TINY / 'config.json'}:"
            ' lower it or leave it out, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN = "1" in'
            " [engine.NAME.environment] if the model can do more"
        )
    ]
    assert not report(file, {host_checks.ALLOW_LONGER: "true"})
    assert not report(written(f'{GOOD}context_max = 4097\nenvironment.{host_checks.ALLOW_LONGER} = "1"\n'))
    assert not report(written(f"{GOOD}context_max = 4096\n"))
    assert not report(written(f"{GOOD.replace('device', 'kind').replace('cpu', 'simulated')}context_max = 4097\n"))


def test_experts_are_for_a_model_that_has_some_and_a_layout_is_looked_for_beside_the_file(
    written: Written, tmp_path: Path
) -> None:
    mixture = tmp_path / "mixture"
    shutil.copytree(TINY, mixture)
    config = json.loads((TINY / "config.json").read_text())
    (mixture / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    record = 'experts.record = "stat"\n'
    assert "is for a mixture of experts, and tiny has none" in report(written(GOOD + record))
    with_experts = GOOD.replace(str(TINY), str(mixture))
    assert not report(written(with_experts + record))
    file = written(f'{with_experts}experts.layout = "places.json"\n')
    assert f"line 9: engine.tiny-0.experts.layout: {file.parent / 'places.json'} cannot be read" in report(file)
    (file.parent / "places.json").write_text('{"logical_count": [[1, 2]]}')
    assert not report(file)
    assert experts_of(mixture) == 8
    assert experts_of(mixture, '{"n_routed_experts": 4, "num_experts": null}') == 4
    assert experts_of(TINY) == 0
    assert experts_of(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (f'{GOOD}kind = "vllm"\n', 'engine.tiny-0.kind: expected "sglang" or "simulated" or "trtllm", got "vllm"'),
        (f"{GOOD}kind = 3\n", 'engine.tiny-0.kind: expected "sglang" or "simulated" or "trtllm", got 3'),
        (f'{GOOD}settings.load_format = ["auto"]\n', "engine.tiny-0.settings.load_format: "),
        (GOOD.replace(str(TINY), "~no-such-user/model") + "context_max = 5000\n", "model.tiny.path: "),
    ],
)
def test_what_another_check_refuses_reaches_none_here(written: Written, text: str, mistake: str) -> None:
    (row,) = report(written(text)).splitlines()[1:]
    assert mistake in row


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Return a function that makes the driver list some GPUs."""
    monkeypatch.setattr(host_checks, "DRIVER", tmp_path / "gpus")

    def install(gpus: int) -> None:
        for number in range(gpus):
            (tmp_path / "gpus" / f"0000:{number:02x}:00.0").mkdir(parents=True)

    return install


@pytest.mark.parametrize(
    ("added", "environment", "mistake"),
    [
        ("", {}, None),
        ("tensor_parallel = 4", {}, None),
        (
            "tensor_parallel = 8",
            {},
            "tensor_parallel: needs 8 GPUs on this host (tensor_parallel 8), and 4 are visible",
        ),
        (
            "tensor_parallel = 2\ndata_parallel = 3",
            {},
            "tensor_parallel: needs 6 GPUs on this host (tensor_parallel 2, data_parallel 3), and 4 are visible",
        ),
        (
            "tensor_parallel = 2\nsettings.pp_size = 2\nsettings.base_gpu_id = 1",
            {},
            (
                "tensor_parallel: needs 5 GPUs on this host (tensor_parallel 2, settings.pp_size 2, settings.base_gpu_id 1),"
                " and 4 are visible"
            ),
        ),
        (
            "tensor_parallel = 2",
            {"CUDA_VISIBLE_DEVICES": "3"},
            "tensor_parallel: needs 2 GPUs on this host (tensor_parallel 2), and 1 is visible, by CUDA_VISIBLE_DEVICES",
        ),
        ('tensor_parallel = 2\nenvironment.CUDA_VISIBLE_DEVICES = "2,3"', {"CUDA_VISIBLE_DEVICES": "3"}, None),
        ('tensor_parallel = 2\nenvironment.CUDA_VISIBLE_DEVICES = "GPU-1f,GPU-2e"', {}, None),
        (
            'tensor_parallel = 2\nenvironment.CUDA_VISIBLE_DEVICES = "3,4"',
            {},
            "tensor_parallel: needs 2 GPUs on this host (tensor_parallel 2), and 1 is visible, by CUDA_VISIBLE_DEVICES",
        ),
        (
            "",
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "device: is cuda, and no GPU of this host is visible: CUDA_VISIBLE_DEVICES is '-1'",
        ),
    ],
)
def test_an_engine_with_more_ranks_than_visible_gpus_is_a_mistake(
    written: Written,
    driver: Callable[[int], None],
    added: str,
    environment: Mapping[str, str],
    mistake: str | None,
) -> None:
    driver(4)
    rows = [
        row.partition(": engine.tiny-0.")[2] for row in report(written(f"{CUDA}{added}\n"), environment).splitlines()
    ]
    assert rows[1:] == ([] if mistake is None else [mistake])


def test_gpus_are_counted_by_the_drivers_program_where_the_kernel_lists_none(
    written: Written, driver: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(f"{CUDA}tensor_parallel = 2\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_checks, "OTHER_DRIVERS", ())
    assert "engine.tiny-0.device: is cuda, and no GPU of this host is visible: no driver of NVIDIA is load" in report(
        file
    )
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1f)'\necho '  MIG 1g.10gb'\n")
    program.chmod(0o755)
    assert "needs 2 GPUs on this host (tensor_parallel 2), and 1 is visible" in report(file)
    program.write_text("#!/bin/sh\nexit 9\n")  # a driver that answers nothing
    assert not report(file)
    program.unlink()
    monkeypatch.setattr(host_checks, "OTHER_DRIVERS", (tmp_path,))  # AMD's, whose GPUs nothing here counts
    assert not report(file)


def test_what_other_hosts_have_cannot_be_seen_from_here(written: Written, driver: Callable[[int], None]) -> None:
    remote = '[node.main]\nhost = "192.0.2.1"\nlisten = "192.0.2.1:7401"\n[node.front]\n[gateway]\nnode = "front"\n'
    environment = {"ESPALIER_CLUSTER_SECRET": "a-secret-that-nobody-guesses"}
    driver(1)
    assert not report(written(f"{CUDA}tensor_parallel = 8\ncontext_max = 5000\n{remote}"), environment)
