"""A job's process can compute, and nothing else: no file, no connection, no process, no signal, no more memory or time."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from textwrap import dedent, indent

import pytest

from actors.media.decoder import sandbox
from actors.media.jobs import FILTERED_MACHINES

pytestmark = pytest.mark.realtime

PROGRAM = """
import ctypes, fcntl, os, resource, signal, socket, sys, time
from actors.media.decoder import job, sandbox
from actors.media.jobs import JobLimits
sandbox.enter(JobLimits(cpu_s=1, memory_bytes=64 << 20, output_bytes=1 << 20), sandbox.own_address_space(), filtered={filtered})
try:
{body}
except BaseException as error:
    os.write(2, type(error).__name__.encode())
    os._exit(3)
os._exit(0)
"""


def run(body: str, *, filtered: bool = True) -> tuple[int, str]:
    """Return how a process ends that does something in the sandbox, and what it writes."""
    program = PROGRAM.format(body=indent(dedent(body), "    "), filtered=filtered)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


needs_filter = pytest.mark.skipif(not sandbox.allowed_calls(), reason="no filter for this machine's architecture")


FORBIDDEN = [
    "open('/etc/passwd')",
    "os.stat('/etc/passwd')",
    "os.listdir('/')",
    "os.readlink('/proc/self/exe')",
    "socket.socket()",
    "socket.socket(socket.AF_UNIX)",
    "os.fork()",
    "os.execv('/bin/true', ['true'])",
    "os.kill(os.getppid(), 0)",
    "os.pidfd_open(os.getppid())",
    "os.killpg(0, signal.SIGTERM)",
    "os.setpriority(os.PRIO_PROCESS, 0, 5)",
    "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
    "import threading; threading.Thread(target=print).start()",
    "os.mkfifo('/tmp/x')",
    "os.unlink('/tmp/x')",
    "os.chdir('/')",
    "import sqlite3",
]
SIGNALLING = [  # commands of fcntl by which a descriptor would signal another process, or another descriptor come to be
    "10, signal.SIGKILL",  # F_SETSIG
    "fcntl.F_SETOWN, os.getppid()",
    "15, bytes(8)",  # F_SETOWN_EX
    "fcntl.F_SETFL, os.O_ASYNC",
    "fcntl.F_SETLEASE, fcntl.F_RDLCK",
    "fcntl.F_NOTIFY, 0",
    "fcntl.F_DUPFD, 0",
]
REFUSALS = "PermissionError, OSError, RuntimeError, ValueError, ImportError"


@needs_filter
@pytest.mark.parametrize(
    ("bodies", "errors"),
    [(FORBIDDEN, REFUSALS), ([f"fcntl.fcntl(0, {words})" for words in SIGNALLING], "PermissionError")],
    ids=["calls", "signals"],
)
def test_nothing_of_the_machine_can_be_reached(bodies: list[str], errors: str) -> None:
    """Each is refused alone in one process, and the last line says that the process came to its end."""
    tried = f"""
    for body in {bodies!r}:
        try:
            exec(body)
        except ({errors}):
            continue
        os.write(2, body.encode() + b" is allowed;")
    os.write(2, b"all tried")
    """
    assert run(tried) == (0, "all tried")


@needs_filter
def test_a_file_in_memory_can_be_written_and_sealed() -> None:
    assert run("assert os.lseek(job.write_sealed([b'12', b'345']), 0, os.SEEK_END) == 5") == (0, "")


def test_memory_is_limited() -> None:
    assert run("bytes(100 << 20)", filtered=False) == (3, "MemoryError")


def test_processor_time_is_limited_and_its_end_is_known_by_the_signal() -> None:
    assert run("while True: pass")[0] == -signal.SIGXCPU


def test_the_size_of_a_file_is_limited() -> None:
    assert run("job.write_sealed([bytes(2 << 20)])") == (3, "OSError")


def test_other_descriptors_are_closed() -> None:
    read, write = os.pipe()
    try:
        program = f"""
            import os
            from actors.media.decoder import sandbox
            kept, closed = os.dup({write}), os.dup(0)
            sandbox.keep_descriptors((kept,))
            os.write(kept, b"kept")
            os.write(1, b"lost")
            try:
                os.fstat(closed)
            except OSError:
                os._exit(0)
            os._exit(1)
        """
        command, no_input = [sys.executable, "-c", dedent(program)], subprocess.DEVNULL
        done = subprocess.run(command, pass_fds=[write], stdout=subprocess.PIPE, stdin=no_input, check=False)
        assert (done.returncode, done.stdout, os.read(read, 10)) == (0, b"", b"kept")
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("machine", FILTERED_MACHINES)
def test_the_filter_knows_the_system_calls_of_each_machine_that_has_one(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert len(sandbox.allowed_calls()) > 30
