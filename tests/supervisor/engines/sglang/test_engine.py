"""An engine that ends is reported with its own reason: the host's, the last error in its log, or how it was killed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from actors.engines.port import Engine
from actors.engines.sglang.spec import SglangSpec
from protocol.errors import StartFailed
from supervisor.engines.host.life import HostRuntime
from supervisor.engines.sglang.engine import run_engine
from supervisor.engines.sglang.spawn import spawn_starter
from supervisor.processes import run_folder
from supervisor.processes.output_log import OutputLog
from supervisor.processes.process import GracePeriods, Ladder
from supervisor.processes.run_folder import RunFolder
from supervisor.supervision.registration import Registration

pytestmark = pytest.mark.realtime

SAY_GOODBYE = """
import os, socket, sys
from protocol.link.frames import Bye
from protocol.link.peer import Peer
link, peer = socket.socket(fileno=int(sys.argv[1])), Peer("e", serves_max=0)
peer.send(Bye("start_failed", {detail!r}))
link.sendall(peer.data_to_send())
os.kill(os.getpid(), 9)
"""
KILL = "import os; os.kill(os.getpid(), 9)"
TRACEBACK = """
print('Traceback (most recent call last):')
print('  File "loader.py", line 3, in load')
print('    assert size == expected')
print('           ^^^^^^^^^^^^^^^^')
"""
SIGQUIT = "print('[2026-11-28] Received sigquit from a child process. It usually means the child failed.')\n"


@pytest.fixture
def folder(folder: Path) -> Iterator[RunFolder]:
    with run_folder.run_folder(folder, lambda *_: None) as made:
        yield made


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (
            f"print('safetensors_rust.SafetensorError: header too large')\n{SIGQUIT}{KILL}",
            "safetensors_rust.SafetensorError: header too large",
        ),
        (
            f"print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.')\n{SIGQUIT}{KILL}",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (f"{TRACEBACK}print('AssertionError')\n{SIGQUIT}{KILL}", "AssertionError: assert size == expected"),
        ("raise SystemExit(3)", "it exited with code 3; its log ends: it printed nothing"),
        (
            f"print('loading', flush=True)\n{KILL}",
            "it was killed by SIGKILL, as the kernel does when memory runs out; its log ends: loading",
        ),
        (
            "print('ValueError: of a request')\nprint('host ends: the engine\\'s process 7 has ended, killed by SIGKILL')",
            "the engine's process 7 has ended, killed by SIGKILL",
        ),
        ("print('host ends: the link to the node is closed')", "the link to the node is closed"),
        (SAY_GOODBYE.format(detail="ValueError: no such model"), "ValueError: no such model"),
        (
            "print('MemoryError: no room', flush=True)\n"
            + SAY_GOODBYE.format(detail="RuntimeError: Initialization failed. Please see the error messages above."),
            "MemoryError: no room",
        ),
        (
            SAY_GOODBYE.format(detail="RuntimeError: Rank 0 scheduler died during initialization (exit code: -9)."),
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).",
        ),
    ],
)
async def test_a_start_that_fails_ends_with_the_engines_own_reason(
    folder: RunFolder, tmp_path: Path, host: str, reason: str
) -> None:
    start_host = spawn_starter(os.environ, "cuda", (sys.executable, "-u", "-c", host))
    output_log, ladder = partial(OutputLog, tmp_path / "engine.log"), Ladder(0.5, 0.5, 5.0)
    runtime = HostRuntime(folder, lambda _: output_log(), GracePeriods(), ladder, time.time)
    engines: Registration[Engine] = Registration()
    with trio.fail_after(60), pytest.raises(StartFailed) as caught:
        await run_engine(SglangSpec("e", "/m", "cuda", 4, 4096), start_host, engines, runtime)
    assert str(caught.value) == f"engine e did not start: {reason}"
