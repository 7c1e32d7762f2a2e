"""Scenes of the scenario `endings`, each once, with real processes, signals and an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.faults.endings import DEATHS, ENDS, references, terminated_with_streams
from bench.rig.node import node

pytestmark = pytest.mark.engine


@pytest.mark.nightly
def test_a_node_survives_the_death_of_each_of_its_processes(folder: Path) -> None:
    """Scheduler, host, a loading host and zygote die one after the other under running streams; then SIGTERM, too."""
    with node(folder, drain_s=120.0) as target:
        texts = references(target)
        for scene in DEATHS.values():
            scene(target, texts)
        assert target.metric("espalier_child_restarts_total", child="main/zygote/process") == 1
        assert target.metric("espalier_engine_running") == target.metric("espalier_engine_kv_tokens_used") == 0
        terminated_with_streams(target, texts)


# The others are variants, which `make endings` runs.
@pytest.mark.parametrize("scene", ["node kill -9", "second SIGTERM"])
def test_a_node_ends_and_leaves_nothing(scene: str, folder: Path) -> None:
    ENDS[scene](folder)
