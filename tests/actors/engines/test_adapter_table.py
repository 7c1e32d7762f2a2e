"""Which adapters a request may name, and what loading and unloading make of that."""

from __future__ import annotations

import pytest

from actors.engines.adapter_table import AdapterTable
from protocol.errors import AdapterNotLoaded, BadRequest, Overloaded
from protocol.messages.adapters import Adapter

ONE, TWO = Adapter("one", "1"), Adapter("two", "2")


def table(loaded_max: int = 2) -> AdapterTable:
    made = AdapterTable(loaded_max)
    made.add(ONE, "/one", 4)
    return made


def test_a_name_is_loaded_once_and_no_more_than_there_is_room_for() -> None:
    full = table()
    with pytest.raises(BadRequest, match="loaded already, from /one"):
        full.check_new("one")
    full.check_new("two")
    full.add(TWO, "/two")
    with pytest.raises(BadRequest, match="loaded_max is 2"):
        full.check_new("three")
    for wrong in ("", "a b", "-a", "a" * 65, "a:b", "a/b"):
        with pytest.raises(BadRequest, match="name of an adapter"):
            full.check_new(wrong)


def test_only_a_loaded_adapter_with_the_same_files_is_taken() -> None:
    loaded = table()
    loaded.take(ONE)
    with pytest.raises(AdapterNotLoaded, match="'two' is not loaded; there is one"):
        loaded.take(TWO)
    with pytest.raises(AdapterNotLoaded, match="other files"):
        loaded.take(Adapter("one", "2"))


def test_an_adapter_leaves_after_its_last_request() -> None:
    loaded, unused = table(), list[str]()
    loaded.take(ONE)
    loaded.take(ONE)
    with loaded.leaving("one", lambda: unused.append("one")) as is_unused:
        assert not is_unused
        with pytest.raises(AdapterNotLoaded, match="being unloaded"):
            loaded.take(ONE)
        with pytest.raises(Overloaded), loaded.leaving("one", lambda: None):
            pass
        loaded.release(ONE)
        assert unused == []
        loaded.release(ONE)
        assert unused == ["one"]
        loaded.remove("one")
    assert loaded.adapters == ()
    loaded.release(ONE)  # of nothing


def test_an_adapter_that_stays_takes_requests_again() -> None:
    loaded = table()
    loaded.take(ONE)
    with loaded.leaving("one", lambda: None):
        assert "1 requests still use adapter one" in loaded.still_used("one", 3)
    loaded.take(ONE)
    assert [(each.name, each.requests) for each in loaded.listed().adapters] == [("one", 2)]


def test_a_withdrawn_adapter_is_listed_and_takes_nothing() -> None:
    loaded = table()
    loaded.withdraw("one")
    assert loaded.adapters == ()
    assert [each.name for each in loaded.listed().adapters] == ["one"]
    with pytest.raises(AdapterNotLoaded):
        loaded.take(ONE)
    with pytest.raises(AdapterNotLoaded, match="'two'"), loaded.leaving("two", lambda: None):
        pass
