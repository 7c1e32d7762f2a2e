"""Set-up of all tests: repeatable Hypothesis examples without deadlines, and a limit for turns of the event loop.

No turn of the event loop may take long, whatever a test is about: one that does fails it. `turns_exempt` says why not.
"""

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, settings

from bench.rig.node import short_folder
from tests.rig.turns import cpu_watched

settings.register_profile("espalier", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("espalier")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder for nodes, whose path is short enough for their sockets."""
    with short_folder() as path:
        yield path


INTERRUPTED = pytest.StashKey[bool]()
CLOCKS = {"autojump_clock", "mock_clock"}


@pytest.fixture
def rather_slow() -> trio.testing.MockClock:
    """Return a clock for tests with sockets, which are quick, but not as quick as virtual time: it jumps after 2 ms."""
    return trio.testing.MockClock(autojump_threshold=0.002)


@pytest.fixture
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which so much happens that logging it takes longer than doing it."""
    monkeypatch.setattr(logging.getLogger("supervisor.supervision.supervise"), "disabled", True)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Refuse a test whose fixture asks for a virtual clock that it does not ask for itself: its time would be real."""
    for item in items:
        fixtures = item._fixtureinfo  # noqa: SLF001  # nothing public says what fixtures themselves ask for
        named, asked = CLOCKS & set(fixtures.argnames), CLOCKS & set(fixtures.names_closure)
        if asked and not named:
            raise pytest.UsageError(f"{item.nodeid} must name {min(asked)}, as one of its fixtures does")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is imported and collected out of the garbage collector's sight: it is a tenth of all the time of tests."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do the same at the end of each file with what the report keeps of its tests."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the run after a test that Ctrl-C ended: Trio raises it in a group, which pytest takes for a failed test."""
    result = yield
    if INTERRUPTED in item.stash:
        raise KeyboardInterrupt
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note that a group of exceptions has a `KeyboardInterrupt` in it."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None:
        item.stash[INTERRUPTED] = True
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Fail a test in which a task of the product kept the event loop for too long."""
    if item.get_closest_marker("turns_exempt") is not None:
        return (yield)
    with cpu_watched() as exceeded:
        result = yield
    if exceeded:
        pytest.fail("\n".join(exceeded[:5]), pytrace=False)
    return result
