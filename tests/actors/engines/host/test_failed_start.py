"""A host whose engine cannot start tells its node why, and ends."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from actors.engines.host_ends import START_FAILED
from bench.rig.node import ROOT
from protocol.link.frames import Bye
from protocol.link.peer import Peer

pytestmark = pytest.mark.realtime

HOST = """
import socket, sys
from pathlib import Path
from actors.engines.host.failed_start import fail_start
from actors.engines.host.watchdog import Watchdog
fail_start("e", socket.socket(fileno=int(sys.argv[1])), Watchdog(Path("/nowhere")), OSError("no such model"))
"""


def test_the_reason_of_a_failed_start_is_in_the_bye_and_in_the_log() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", HOST, str(theirs.fileno())]
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            check=False,
        )
        theirs.close()
        peer = Peer("node", serves_max=0)
        peer.data_to_send()
        byes = [frame for frame in peer.receive_data(ours.recv(65536)) if isinstance(frame, Bye)]
    assert [(bye.code, bye.detail) for bye in byes] == [(START_FAILED, "OSError: no such model")]
    assert ended.stderr.decode() == "host ends: the engine could not start: OSError('no such model')\n"
