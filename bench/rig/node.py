"""A node to measure: started with a configuration of its own, observed from outside, and always ended.

Its processes are read from `/proc`, its files from its `TMPDIR`, its shared memory from the mappings of its processes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import SystemRandom
from typing import IO

from bench.rig.processes import MARK, SHARED_MEMORY, ProcessEntry, process_table, shared_memory_names, was_marked

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
EXIT_MAX_S = 2.0
READY_WITHIN_S = 120.0
POLL_S = 0.005
LISTENING_PORT_MIN = 12_000
PORTS_MIN = 5_000  # from which free ones are drawn
_given = deque[int](maxlen=PORTS_MIN // 4)  # the latest ports, which those they were given to may not listen on yet
PR_SET_PDEATHSIG = 1
CHECKER = "espalier::grammars"
CHILD_OF = {"node": "zygote", "zygote": "host", "host": "scheduler"}

SIMULATED = """\
kind = "simulated"
context_max = 8192
kv_tokens_max = 8_000_000
[engine.tiny-0.simulated.costs]
fixed_s = 0.05 # 20 tokens a second for each stream
per_prefill_token_s = 0.0
per_running_s = 0.0
"""
SGLANG = """\
device = "cpu"
kv_tokens_max = 16384
"""

CLUSTER = """\
[node.main]
drain_s = {drain_s}
logs = "{logs}"
[gateway]
port = {port}
{gateway}
[model.{model}]
path = "{path}"
queue_max = {slots}
[engine.{model}-0]
model = "{model}"
slots = {slots}
{engine}
"""


def free_port() -> int:
    """Return a port that no process listens on now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different unused ports outside the kernel's range for outgoing connections.

    None of them has been returned lately.
    """
    ports, chance = list[int](), SystemRandom()  # the seeds of tests must not choose the same for each of them
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with ExitStack() as stack:
        while len(ports) < count:
            port = chance.randrange(LISTENING_PORT_MIN, first) if first > LISTENING_PORT_MIN + PORTS_MIN else 0
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):  # it is in use
                probe.bind(("127.0.0.1", port))
                if (number := int(probe.getsockname()[1])) not in _given:
                    ports.append(number)
    _given.extend(ports)
    return ports


def wait_until(holds: Callable[[], object], within_s: float, every_s: float = POLL_S) -> float | None:
    """Return after how many seconds `holds` was true, None if it was not within `within_s`."""
    start = time.perf_counter()
    while not holds():
        if time.perf_counter() - start > within_s:
            return None
        time.sleep(every_s)
    return time.perf_counter() - start


# The node --------------------------------------------------------------------------------


@dataclass
class Node:
    """One node, its port, and the places where it could leave something."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path  # of this node: its configuration, its output, its engines' logs
    tmp: Path  # its TMPDIR
    mark: str
    started_at: float
    observed: dict[int, ProcessEntry] = field(default_factory=dict)  # every process of it so far, by its pid
    roles: dict[int, str] = field(default_factory=dict)  # of each process, by its parent when it was first observed
    shared_memory: set[str] = field(default_factory=set)  # names under /dev/shm that its processes ever had mapped
    admin_key: str = ""  # empty: its paths for an admin key need none

    @property
    def authorization(self) -> dict[str, str]:
        """The headers that open every path of its gateway."""
        return {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}

    @property
    def pid(self) -> int:
        """The node's own process."""
        return self.process.pid

    def output(self) -> str:
        """Return what the node has logged so far."""
        return (self.folder / "output").read_text()

    def observe(self) -> dict[str, ProcessEntry]:
        """Return the node's living processes by role: node, zygote, host, scheduler, checker; the youngest of each."""
        everything = process_table()
        ours = {self.pid}
        while more := {entry.pid for entry in everything if entry.parent in ours} - ours:
            ours |= more
        sessions = {entry.session for entry in self.observed.values()} | ours
        ours |= {entry.pid for entry in everything if entry.session in sessions or was_marked(entry.pid, self.mark)}
        living = [entry for entry in everything if entry.pid in ours and entry.state not in "ZX"]
        living.sort(key=lambda entry: int(entry.started))
        self.roles.setdefault(self.pid, "node")
        for entry in living:
            role = CHILD_OF.get(self.roles.get(entry.parent, ""))
            # Zygotes and hosts also start helpers; a host is the child that leads a session.
            if entry.command.startswith(CHECKER):  # forked from the zygote, as a host is, and named a moment later
                self.roles[entry.pid] = "checker"
            elif role is not None and (role != "host" or entry.session == entry.pid):
                self.roles.setdefault(entry.pid, role)
            self.observed[entry.pid] = entry
            self.shared_memory |= shared_memory_names(entry.pid)
        return {self.roles[entry.pid]: entry for entry in living if entry.pid in self.roles}

    def living(self) -> list[ProcessEntry]:
        """Return the node's living processes, former descendants included."""
        self.observe()
        return [entry for entry in self.observed.values() if entry.lives]

    def leftovers(self) -> list[str]:
        """Return what the node has left behind: processes, files, names under `/dev/shm`."""
        processes = [f"process {entry.pid}: {entry.command}" for entry in self.living()]
        files = [str(path) for path in sorted(self.tmp.rglob("*"))]
        shared = (SHARED_MEMORY / name for name in sorted(self.shared_memory))
        return processes + files + [str(path) for path in shared if path.exists()]

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one of the node's processes."""
        os.kill(self.observe()[role].pid, number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the node itself."""
        os.kill(self.pid, number)

    def wait_exit(self, within_s: float) -> float | None:
        """Return after how many seconds the node's own process had ended, None if it had not."""
        start = time.perf_counter()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        return time.perf_counter() - start

    def wait_gone(self, within_s: float = EXIT_MAX_S) -> float | None:
        """Return after how many seconds no process of the node lived, None if one still did."""
        self.process.poll()
        return wait_until(lambda: self.process.poll() is not None and not self.living(), within_s)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Return status and body of one GET; status 0 without an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path, headers=self.authorization)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, HTTPException):
            return 0, b""
        finally:
            connection.close()

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> float:
        """Return how long after its start the node was ready; raises if it was not, or ended."""

        def ready_or_ended() -> bool:
            return self.process.poll() is not None or self.get("/ready")[0] == 200

        if wait_until(ready_or_ended, within_s, every_s=0.02) is None or self.process.poll() is not None:
            raise RuntimeError(f"the node did not get ready:\n{self.output()}")
        took_s = time.perf_counter() - self.started_at
        self.observe()
        return took_s

    def metric(self, name: str, **labels: str) -> float:
        """Return one metric, summed over the series whose labels include `labels`; 0 if there is none."""
        return metric(self.get("/metrics")[1].decode(), name, **labels)

    def end(self) -> None:
        """Kill its processes, and remove its shared memory."""
        for entry in self.living():
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)
        self.process.wait(10)
        wait_until(lambda: not self.living(), 5.0)
        for name in self.shared_memory:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def metric(text: str, name: str, **labels: str) -> float:
    """Return one metric of a scrape, summed over the series whose labels include `labels`."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = (line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(each in line for each in wanted))


def _die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_process(
    arguments: Sequence[str], output: IO[bytes] | int, environment: Mapping[str, str], prefix: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a node or a launcher in a session of its own, logging to `output`; `environment` is added.

    `prefix` is a command that runs the rest, such as `prlimit`.
    """
    return start_command([*prefix, sys.executable, "-m", "supervisor", *arguments], output, environment)


def start_command(
    words: Sequence[str], output: IO[bytes] | int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, from the root of the repository; `environment` is added.

    The kernel kills it when the thread that started it ends.
    """
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_die_with_parent,  # noqa: PLW1509  # one system call, and no lock is taken
    )


@contextmanager
def short_folder() -> Iterator[Path]:
    """Create a folder with a short path, since a Unix socket's path is limited, and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="eb-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def node(
    folder: Path,
    *,
    ready: bool = True,
    drain_s: float = 30.0,
    slots: int = 16,
    engine: str = SGLANG,
    model: Path = ROOT / "examples" / MODEL,
    gateway: str = "",
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    output: int | None = None,
    admin_key: str = "",
) -> Iterator[Node]:
    """Start a node with its files under `folder`, and end it with the body.

    Two nodes of one folder, one after the other, share their `TMPDIR`: the second removes what the first left. `engine`
    and `gateway` are lines of those tables beside slots and port; `environment` is added to this process's, and so is
    `admin_key`. The node logs to a file, or to the descriptor `output`; `prefix` is a command that runs it, such as
    `prlimit`.
    """
    port, tmp, logs = free_port(), folder / "t", folder / "logs"
    for path in (tmp, logs):
        path.mkdir(exist_ok=True)
    cluster = folder / f"{port}.toml"
    cluster.write_text(
        CLUSTER.format(
            drain_s=drain_s,
            logs=logs,
            port=port,
            model=MODEL,
            path=model,
            slots=slots,
            engine=engine,
            gateway=gateway,
        )
    )
    mark = f"{os.getpid()}-{port}"
    with (folder / "output").open("wb") as file:
        key = {"ESPALIER_ADMIN_KEY": admin_key} if admin_key else {}
        added = {"TMPDIR": str(tmp), MARK: mark, **key, **(environment or {})}
        process = start_process([str(cluster)], file if output is None else output, added, prefix)
    running = Node(process, port, folder, tmp, mark, time.perf_counter(), admin_key=admin_key)
    try:
        if ready:
            running.wait_ready()
        yield running
    finally:
        running.end()
