"""The table of adapters: paths begin at the file, and what contradicts itself is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from supervisor.config.adapters import AdaptersSection
from supervisor.engines.sglang import adapters_section
from supervisor.engines.sglang.adapters_section import SglangAdapters

USUAL = SglangAdapters(max_rank=8)


def test_a_relative_path_begins_at_the_folder_of_the_file(tmp_path: Path) -> None:
    section = AdaptersSection(load={"a": "adapters/a", "b": "/b"})
    assert section.folders(tmp_path) == {"a": str(tmp_path.resolve() / "adapters" / "a"), "b": "/b"}


@pytest.mark.parametrize(
    ("section", "where"),
    [
        (AdaptersSection(load={"a b": "/a"}), "engine.x.adapters.load"),
        (AdaptersSection(load={"a": "/a", "b": "/b"}, loaded_max=1), "engine.x.adapters.loaded_max"),
    ],
)
def test_names_and_numbers_are_checked(section: AdaptersSection, where: str) -> None:
    (mistake,) = section.mistakes("engine.x.adapters")
    assert mistake.path.startswith(where)


@pytest.mark.parametrize(
    ("own", "settings", "where"),
    [
        (None, {"lora_backend": "triton"}, "settings.lora_backend"),
        (USUAL, {"lora_backend": "csgmv"}, "settings.lora_backend"),
        (USUAL, {"load_format": "pt"}, "settings.load_format"),
        (USUAL, {"load_format": "dummy"}, "settings.load_format"),
        (evolve(USUAL, target_modules=("all", "q_proj")), {}, "adapters.target_modules"),
    ],
)
def test_settings_of_sglang_that_contradict_the_table_are_refused(
    own: SglangAdapters | None, settings: dict[str, Any], where: str
) -> None:
    (mistake,) = adapters_section.mistakes(own, settings, "cpu", "engine.x")
    assert mistake.path == f"engine.x.{where}"


def test_what_goes_together_is_taken() -> None:
    assert not [*adapters_section.mistakes(None, {"load_format": "pt"}, "cpu", "engine.x")]
    assert not [*adapters_section.mistakes(USUAL, {"lora_backend": "torch_native"}, "cpu", "engine.x")]
    assert not [*adapters_section.mistakes(USUAL, {"lora_backend": "triton"}, "cuda", "engine.x")]
