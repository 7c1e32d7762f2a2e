"""The table of an engine that reads the files of its adapters, and its adapters from one life to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from actors.engines.adapter_files import AdapterBounds, AdapterLimits
from actors.engines.hosted_engine import HostedEngine
from protocol.messages.adapters import AdapterList, LoadedAdapter
from supervisor.engines.file_adapters import FileAdapters, with_loaded
from tests.rig.adapters import TINY, write_adapter

LIMITS = AdapterLimits(bounds=AdapterBounds(8), loaded_max=4, folders={"one": "/one", "two": "/two"})


def test_a_table_has_the_limits_of_its_keys_and_folders_from_its_file_on(tmp_path: Path) -> None:
    table = FileAdapters(max_rank=4, target_modules=("q_proj",), loaded_max=2, load={"a": "a"})
    limits = AdapterLimits(bounds=AdapterBounds(4, ("q_proj",)), loaded_max=2, folders={"a": str(tmp_path / "a")})
    assert table.limits(tmp_path.resolve()) == limits


def test_the_files_of_the_first_adapters_are_checked_against_the_model(tmp_path: Path) -> None:
    for name, rank in (("good", 4), ("large", 16)):
        write_adapter(tmp_path / name, rank=rank)
    table = FileAdapters(max_rank=8, load={"a": "good", "b": "large", "c": "none"})
    found = [(each.path, each.message) for each in table.file_mistakes(tmp_path, TINY, "engine.e.adapters")]
    assert [path for path, _ in found] == ["engine.e.adapters.load.b", "engine.e.adapters.load.c"]
    assert "its rank is 16, and max_rank is 8" in found[0][1]


def test_all_is_named_alone() -> None:
    (mistake,) = FileAdapters(max_rank=8, target_modules=("all", "q_proj")).mistakes("engine.e.adapters")
    assert mistake.path == "engine.e.adapters.target_modules"


def engine(*adapters: LoadedAdapter, has_changed: bool = True) -> HostedEngine:
    return HostedEngine(cast("Any", None), cast("Any", None), AdapterList(adapters) if has_changed else None)


def test_the_next_life_has_the_adapters_of_the_last_and_can_do_without_those_that_came_later() -> None:
    last = engine(
        LoadedAdapter("one", "d", "/one"), LoadedAdapter("two", "d", "/other"), LoadedAdapter("late", "d", "/l")
    )
    limits = with_loaded(LIMITS, last)
    assert limits is not None
    assert limits.folders == {"one": "/one", "two": "/other", "late": "/l"}
    assert limits.dispensable == ("two", "late")


@pytest.mark.parametrize("last", [None, engine(has_changed=False)])
def test_without_a_change_the_next_life_begins_as_the_first(last: HostedEngine | None) -> None:
    assert with_loaded(LIMITS, last) is LIMITS
    assert with_loaded(None, last) is None
