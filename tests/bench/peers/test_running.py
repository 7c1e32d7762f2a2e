"""A server is started, found ready, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bench.peers.peer import ROOT, Command, Peer, Setup
from bench.peers.running import NotReady, NotStarted, started
from bench.peers.table import RIVALS
from bench.rig.node import free_port, wait_until
from bench.rig.processes import ProcessEntry, family, process_entry, process_table

SERVER = """\
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"data": [{"id": "tiny"}]}')
    def do_POST(self):
        print("posted", self.path, flush=True); self.send_response(200); self.end_headers()
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def peer(*words: str, environments: tuple[str, ...] = ()) -> Peer:
    def commands(setup: Setup) -> list[Command]:
        post = f"http://127.0.0.1:{setup.port}/freeze"
        return [Command("server", (*words, str(setup.port)), {"OWN": "1"}, posts=(post,))]

    return Peer(name="fake", title="A fake", engine="simulated", commands=commands, environments=environments)


def test_a_peer_that_is_not_installed_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, port=1, environments=tmp_path)
    (tmp_path / "sglang" / "bin").mkdir(parents=True)  # begun, and not finished
    with pytest.raises(NotStarted, match=r"python -m bench peers install smg sglang$"), started(RIVALS["smg"], setup):
        pass


def test_a_server_has_no_more_engines_than_it_can(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, port=1, workers=2)
    with pytest.raises(NotStarted, match="at most 1 engines, not 2"), started(peer("true"), setup):
        pass


@pytest.mark.realtime
def test_a_started_server_is_ready_and_leaves_no_process(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, port=free_port())
    with started(peer(sys.executable, "-c", SERVER), setup) as running:
        assert running.is_ready()
        assert "posted /freeze" in running.output("server")
        below = {entry.pid for entry in running.processes()}
        assert len(below) == 2
        assert set(running.root_pids) < below
        assert b"OWN=1" in Path(f"/proc/{running.root_pids[0]}/environ").read_bytes()
    assert not any((entry := process_entry(pid)) is not None and entry.lives for pid in below)


@pytest.mark.realtime
def test_stopping_kills_what_the_signal_does_not_end(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, port=free_port())
    stubborn = SERVER.replace('["sleep"', '["setsid", "sleep"')
    with started(peer(sys.executable, "-c", stubborn), setup) as running:
        child = int(running.output("server").split()[1])
        assert running.stop(within_s=1.0) is None
        assert (entry := process_entry(child)) is None or not entry.lives


@pytest.mark.realtime
def test_a_server_that_ends_before_it_is_ready_is_reported_with_its_output(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, port=free_port())
    with (
        pytest.raises(NotReady, match="no such model"),
        started(peer(sys.executable, "-c", "raise SystemExit('no such model')"), setup),
    ):
        pass


@pytest.mark.realtime
def test_a_process_of_a_server_can_be_killed_and_started_again(tmp_path: Path) -> None:
    setup = Setup(folder=tmp_path, port=free_port())
    fake = peer(sys.executable, "-c", SERVER)
    with started(fake, setup) as running:
        before, orphan = running.root_pids, int(running.output("server").split()[1])
        os.kill(before[0], signal.SIGKILL)
        running.roots["server"].wait(30)
        assert running.ended() == ["server"]
        running.start(fake.commands(setup)[0])
        running.wait_ready(90)
        assert running.root_pids != before
        assert orphan in {entry.pid for entry in running.processes()}
    assert (entry := process_entry(orphan)) is None or not entry.lives


@pytest.mark.realtime
def test_a_bench_that_is_ended_ends_the_server_that_it_has_started(tmp_path: Path) -> None:
    words = [
        "-m",
        "bench",
        "cost",
        "--server",
        "espalier-simulated-node",
        "--clients",
        "1",
        "--requests-a-client",
        "99",
    ]
    bench = subprocess.Popen([sys.executable, *words], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})

    def below() -> list[ProcessEntry]:
        return [entry for entry in family(process_table(), [bench.pid]) if entry.pid != bench.pid]

    def serves() -> list[ProcessEntry]:
        return [entry for entry in below() if "-m supervisor" in entry.command]

    try:
        assert wait_until(serves, 240.0, 0.05) is not None
        started_processes = below()
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(90) == 128 + signal.SIGTERM
        assert wait_until(lambda: not any(entry.lives for entry in started_processes), 60.0) is not None
    finally:
        for entry in family(process_table(), [bench.pid]):  # nothing, unless an assertion failed
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)
        bench.wait(90)
