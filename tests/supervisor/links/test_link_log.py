"""The log of links that end or cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import PeerLost
from supervisor.links.link_log import LINES_MAX, WINDOW_S, LinkLog
from tests.rig.log_records import log_records


@pytest.fixture
def peers(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Any]]:
    caplog.set_level("INFO")
    return lambda: [record.peer for record in log_records(caplog) if record.message == "no link"]


async def test_a_reason_for_which_there_was_no_room_is_logged_when_there_is(
    peers: Callable[[], list[Any]], autojump_clock: MockClock
) -> None:
    refusals, nodes = LinkLog(), [f"n{number}" for number in range(LINES_MAX + 10)]
    for _ in range(int(WINDOW_S) // 5 + 1):
        for node in nodes:
            refusals.failed(node, PeerLost("nobody is there"))
        await trio.sleep(5)
    assert peers() == nodes
