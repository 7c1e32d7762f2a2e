"""The keys about diffusion language models: what contradicts them, in the file and in the model's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from supervisor.engines.sglang.diffusion import ARCHITECTURES, DiffusionSettings, model_mistake
from tests.rig.cluster_files import TINY
from tests.supervisor.config.test_load import GOOD
from tests.supervisor.engines.sglang.test_host_checks import Written, report

KEY = 'diffusion = "LowConfidence"\n'
ADAPTERS = "adapters.max_rank = 8\n"


@pytest.fixture
def diffusing(tmp_path: Path) -> str:
    """A good file about a diffusion model, but for its key."""
    folder = tmp_path / "sdar"
    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["SDARForCausalLM"]}))
    return GOOD.replace(str(TINY), str(folder))


def test_the_key_is_for_diffusion_models_and_for_all_of_them(written: Written, diffusing: str) -> None:
    assert not report(written(diffusing + KEY))
    assert "engine.tiny-0.diffusion: is missing: SDARForCausalLM is a diffusion" in report(written(diffusing))
    assert "engine.tiny-0.diffusion: is for diffusion language models, and " in report(written(GOOD + KEY))
    assert not report(written(GOOD))
    override = 'settings.json_model_override_args = \'{"architectures": ["SDARForCausalLM"]}\'\n'
    assert "is missing" in report(written(GOOD + override))


@pytest.mark.parametrize(
    ("lines", "mistake"),
    [
        ('diffusion = "Confident"\n', 'diffusion: expected "LowConfidence" or "JointThreshold", got "Confident"'),
        (KEY + "diffusion_settings.threshold = 1.5\n", "diffusion_settings.threshold: "),
        (KEY + "diffusion_settings.speed = 1\n", "diffusion_settings.speed: "),
        (KEY + "diffusion_settings.edit_threshold = 0.5\n", "edit_threshold: is a setting of JointThreshold"),
        ("diffusion_settings.threshold = 0.5\n", "diffusion_settings: means nothing without diffusion"),
        (KEY + 'leg = "prefill"\nbootstrap_port = 9000\n', "leg: must be both for a diffusion model"),
        (KEY + 'admission = "slots"\n', "admission: must be memory for a diffusion model"),
        (KEY + ADAPTERS, "adapters: must be left out for a diffusion model"),
        (KEY + "settings.enable_mixed_chunk = true\n", "enable_mixed_chunk: must be left out for a diffusion model"),
        (KEY + 'settings.dllm_algorithm = "LowConfidence"\n', "dllm_algorithm: is given by diffusion"),
        (KEY + 'settings.dllm_algorithm_config = "a"\n', "is given by [engine.NAME.diffusion_settings]"),
        (KEY + "settings.dllm_fdfo = false\n", "dllm_fdfo: cannot be set: a block is sent once it is ready"),
    ],
)
def test_what_contradicts_the_key_is_a_mistake(lines: str, mistake: str, written: Written, diffusing: str) -> None:
    assert mistake in report(written(diffusing + lines))


def test_settings_are_sglangs_own_and_only_the_given_ones() -> None:
    assert DiffusionSettings().arguments == {}
    assert DiffusionSettings(threshold=0.5, block_size=8).arguments == {"threshold": 0.5, "block_size": 8}


def test_an_architecture_whose_algorithm_has_not_been_tried_is_refused_with_and_without_the_key() -> None:
    for diffusion in (None, "LowConfidence"):
        mistake = model_mistake(diffusion, ARCHITECTURES[-1], "engine.a")
        assert mistake is not None
        assert "has not been tried" in mistake.message
