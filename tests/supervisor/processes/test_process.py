"""How a process ended is known, unless this process ended it."""

from __future__ import annotations

import os
import sys

import pytest
import trio

from supervisor.processes.process import GracePeriods, Ladder, start

pytestmark = pytest.mark.realtime

WAIT = "print('x', flush=True); import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os.kill(os.getpid(), 9)", "it was killed by SIGKILL, as the kernel does when memory runs out"),
        ("import os; os.abort()", "it was killed by SIGABRT"),
        ("raise SystemExit(3)", "it exited with code 3"),
        ("", "it exited with code 0"),
        (WAIT, None),
        (f"import signal; signal.signal(15, signal.SIG_IGN); {WAIT}", None),
    ],
)
async def test_the_signal_or_the_code_of_a_process_is_known_once_it_is_closed(code: str, end: str | None) -> None:
    read, write = os.pipe()
    process = start("child", [sys.executable, "-c", code], dict(os.environ), [], write)
    os.close(write)
    async with trio.lowlevel.FdStream(read) as output:
        with trio.fail_after(60):
            if WAIT in code:
                await output.receive_some(1)
            else:
                await process.wait()
            await process.stop(Ladder(0.2, 0.2, 5.0), GracePeriods())
    assert process.end == end
