"""`[engine.NAME.experts]`: the arguments that SGLang gets from it, and the contradictions in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from supervisor.engines.sglang.experts import SglangExperts, layout_mistake

A2A = {"moe_a2a_backend": "deepep", "deepep_mode": "normal"}


def mistakes(
    device: str = "cuda", ranks: int = 4, settings: dict[str, object] | None = None, **keys: Any
) -> dict[str, str]:
    """Return the mistakes in a table by their keys."""
    found = SglangExperts(**keys).mistakes("experts", device, ranks, settings or {})
    return {mistake.path.removeprefix("experts."): mistake.message for mistake in found}


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"balancing": True}, {"balancing": "needs ranks that share the experts"}),
        ({"parallel": 2}, {"parallel": "must be all tensor-parallel ranks, which are 4 here"}),
        ({"parallel": 4, "device": "cpu"}, {"parallel": "is for GPUs"}),
        ({"redundant": 2}, {"redundant": "means nothing without parallel"}),
        ({"dispatch": "dynamic"}, {"dispatch": "means nothing where no expert has a copy"}),
        ({"parallel": 4, "redundant": 2, "dispatch": "static"}, {"dispatch": "static needs settings.moe_a2a_backend"}),
        ({"parallel": 4, "balancing": True, "record": "stat"}, {"record": "balancing records by itself"}),
        ({"record": "stat_approx"}, {"record": "stat_approx needs settings.moe_a2a_backend"}),
        ({"rebalance_steps": 5}, {"rebalance_steps": "means nothing without balancing"}),
        ({"record_steps": 5}, {"record_steps": "means nothing without record"}),
        (
            {"record": "stat", "settings": {"expert_balancedness_report_mode": "both"}},
            {"record": "settings.expert_balancedness_report_mode records by itself"},
        ),
    ],
)
def test_keys_that_contradict_each_other_are_mistakes(keys: dict[str, Any], wrong: dict[str, str]) -> None:
    found = mistakes(**keys)
    assert found.keys() == wrong.keys()
    assert all(found[key].startswith(why) for key, why in wrong.items()), found


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"record": "stat", "record_steps": 5},
        {"record": "stat", "device": "cpu", "ranks": 1},
        {"parallel": 4, "balancing": True, "rebalance_steps": 5, "redundant": 4},
        {"parallel": 4, "redundant": 4, "dispatch": "static", "settings": A2A},
        {"parallel": 2, "settings": {"moe_dp_size": 2}},
        {"record": "stat_approx", "settings": A2A},
    ],
)
def test_what_fits_together_is_taken(keys: dict[str, Any]) -> None:
    assert mistakes(**keys) == {}


def test_sglang_gets_what_differs_from_its_defaults(tmp_path: Path) -> None:
    assert SglangExperts().arguments(tmp_path) == {}
    assert SglangExperts(record="stat").arguments(tmp_path) == {
        "expert_distribution_recorder_mode": "stat",
        "expert_distribution_recorder_buffer_size": 1000,
    }
    table = SglangExperts(parallel=4, balancing=True, redundant=2, dispatch="dynamic", layout="places.json")
    assert table.arguments(tmp_path) == {
        "ep_size": 4,
        "enable_eplb": True,
        "eplb_rebalance_num_iterations": 1000,
        "ep_num_redundant_experts": 2,
        "ep_dispatch_algorithm": "dynamic",
        "init_expert_location": str(tmp_path / "places.json"),
    }


def test_the_ranks_of_a_record_are_known_where_experts_lie_in_their_order() -> None:
    assert SglangExperts(parallel=4).ranks_recorded == 4
    assert SglangExperts(parallel=4, redundant=4).ranks_recorded == 1
    assert SglangExperts(parallel=4, layout="a.json").ranks_recorded == 1


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.pt", "{}", "is a pickle, which can run code"),
        ("a.txt", "{}", "must end in .json"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "[]", "must have logical_count or physical_to_logical_map"),
        ("a.json", json.dumps({"logical_count": []}), "must have a list of experts for each layer"),
        ("a.json", json.dumps({"logical_count": [[1, 2], [3]]}), "must have as many whole numbers"),
        ("a.json", json.dumps({"physical_to_logical_map": [[1.5]]}), "must have as many whole numbers"),
        ("a.json", json.dumps({"physical_to_logical_map": [[True]]}), "must have as many whole numbers"),
        ("a.json", None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_layout_is_a_mistake(tmp_path: Path, name: str, content: str | None, why: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert why in str(layout_mistake(tmp_path / name))


def test_a_record_is_a_layout(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"logical_count": [[1, 2], [3, 4]]}))
    assert layout_mistake(tmp_path / "a.json") is None
