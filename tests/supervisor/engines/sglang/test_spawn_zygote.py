"""A zygote that does not answer is ended, so that another can take its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio

from actors.engines.sglang.boot_message import BootMessage
from protocol.errors import EngineDied
from supervisor.engines.host.spawn import Descriptors
from supervisor.engines.sglang import spawn
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from supervisor.supervision.registration import Registration

pytestmark = pytest.mark.realtime

STANDS_STILL = (
    "import os, signal, socket, sys;"
    "socket.socket(fileno=int(sys.argv[1])).send(b'ready');"
    "os.kill(os.getpid(), signal.SIGSTOP)"
)


async def test_a_zygote_that_stands_still_is_ended_and_offered_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "FORK_WITHIN_S", 0.2)
    registration: Registration[spawn.Zygote] = Registration()
    ends = []

    async def keep(*, task_status: trio.TaskStatus[None]) -> None:
        with pytest.raises(EngineDied, match="the zygote died"):
            await spawn.zygote(
                registration,
                OutputLog(tmp_path / "zygote.log"),
                GracePeriods(),
                Ladder(stop_s=0.1, term_s=0.1, kill_s=5.0),
                dict(os.environ),
                (sys.executable, "-c", STANDS_STILL),
                task_status=task_status,
            )
        ends.append(registration.current)

    with trio.fail_after(90):
        async with trio.open_nursery() as nursery:
            await nursery.start(keep)
            zygote = await registration.wait()
            with pytest.raises(EngineDied, match="did not fork"):
                await zygote.fork(BootMessage("e", str(tmp_path), {}, {}), Descriptors(0, 1, 2, 0))
    assert ends == [None]
