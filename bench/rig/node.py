"""A node to measure: started with a configuration of its own, watched from outside, and always ended.

Everything here is seen from outside: processes through /proc, files through the folder that the node was given as its
TMPDIR, shared memory through what its processes have mapped.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
MARK = "ESPALIER_BENCH"  # in the environment of everything that a node starts
SHARED_MEMORY = Path("/dev/shm")
EXIT_MAX_S = 2.0
READY_WITHIN_S = 120.0
POLL_S = 0.005
PR_SET_PDEATHSIG = 1
CHECKER = "espalier::grammars"
CHILD_OF = {"node": "zygote", "zygote": "host", "host": "scheduler"}

SIMULATED = """\
kind = "simulated"
context_max = 8192
kv_tokens_max = 8_000_000
[engine.tiny-0.simulated.costs]
fixed_s = 0.05 # 20 tokens a second for everybody
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
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(holds: Callable[[], object], within_s: float, every_s: float = POLL_S) -> float | None:
    """Return after how many seconds `holds` was true, None if it was not within `within_s`."""
    start = time.perf_counter()
    while not holds():
        if time.perf_counter() - start > within_s:
            return None
        time.sleep(every_s)
    return time.perf_counter() - start


# Processes, seen from outside ------------------------------------------------------------


@dataclass(frozen=True)
class ProcessEntry:
    """One process as /proc shows it."""

    pid: int
    parent: int
    session: int
    started: str
    state: str
    command: str

    @property
    def lives(self) -> bool:
        """Whether it still runs; a zombie does not."""
        now = look(self.pid)
        return now is not None and now.started == self.started and now.state not in "ZX"


def look(pid: int) -> ProcessEntry | None:
    """Return what /proc says of a process, None if there is none."""
    folder = Path("/proc") / str(pid)
    try:
        name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    return ProcessEntry(pid, int(fields[1]), int(fields[3]), fields[19], fields[0], command or name)


def cpu_s(pid: int) -> float:
    """Return how much CPU time a process has taken."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_table() -> list[ProcessEntry]:
    """Return every process of the machine that this one may see."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [seen for pid in numbers if (seen := look(pid)) is not None]


def marked(pid: int, mark: str) -> bool:
    """Whether a process was started with our mark in its environment."""
    try:
        return f"{MARK}={mark}\0".encode() in (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def memory_bytes(pid: int, kind: str = "Pss") -> int:
    """Return how much memory a process holds; of what it shares, its share."""
    for line in (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    return 0


def open_files(pid: int) -> int:
    """Return how many file descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def threads(pid: int) -> int:
    """Return how many threads a process has."""
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())


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
    known: dict[int, ProcessEntry] = field(default_factory=dict)  # every process of it that was ever seen
    roles: dict[int, str] = field(default_factory=dict)  # what each is, by its parent when it was first seen
    names: set[str] = field(default_factory=set)  # under /dev/shm, that its processes ever had mapped

    @property
    def pid(self) -> int:
        """The node's own process."""
        return self.process.pid

    def output(self) -> str:
        """Return what the node has logged so far."""
        return (self.folder / "output").read_text()

    def look(self) -> dict[str, ProcessEntry]:
        """Return the node's processes that live, by what they are: node, zygote, host, scheduler, checker."""
        everything = process_table()
        ours = {self.pid}
        while more := {s.pid for s in everything if s.parent in ours} - ours:
            ours |= more
        sessions = {seen.session for seen in self.known.values()} | ours
        ours |= {s.pid for s in everything if s.session in sessions or marked(s.pid, self.mark)}
        living = [seen for seen in everything if seen.pid in ours and seen.state not in "ZX"]
        living.sort(key=lambda seen: int(seen.started))
        self.roles.setdefault(self.pid, "node")
        for seen in living:
            role = CHILD_OF.get(self.roles.get(seen.parent, ""))
            # What imports or loads starts helpers as well; a host is known by the session that it leads.
            if seen.command.startswith(CHECKER):  # forked from the zygote, as a host is, and named a moment later
                self.roles[seen.pid] = "checker"
            elif role is not None and (role != "host" or seen.session == seen.pid):
                self.roles.setdefault(seen.pid, role)
            self.known[seen.pid] = seen
            self.names |= _mapped(seen.pid)
        return {self.roles[seen.pid]: seen for seen in living if seen.pid in self.roles}  # of a kind, the youngest

    def alive(self) -> list[ProcessEntry]:
        """Return the node's processes that live, however they are related to it by now."""
        self.look()
        return [seen for seen in self.known.values() if seen.lives]

    def left(self) -> list[str]:
        """Return what the node has left behind: processes, files, names under /dev/shm."""
        processes = [f"process {seen.pid}: {seen.command}" for seen in self.alive()]
        files = [str(path) for path in sorted(self.tmp.rglob("*"))]
        return processes + files + [str(SHARED_MEMORY / n) for n in sorted(self.names) if (SHARED_MEMORY / n).exists()]

    def kill(self, what: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one of the node's processes."""
        os.kill(self.look()[what].pid, number)

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
        """Return after how many seconds no process of the node was left, None if one was."""
        self.process.poll()
        return wait_until(lambda: self.process.poll() is not None and not self.alive(), within_s)

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """Return status and body of one GET; status 0 where nobody answers."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, HTTPException):
            return 0, b""
        finally:
            connection.close()

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> float:
        """Return how long after its start the node was ready; raises if it was not, or ended."""

        def ready_or_over() -> bool:
            return self.process.poll() is not None or self.get("/ready")[0] == 200

        if wait_until(ready_or_over, within_s, every_s=0.02) is None or self.process.poll() is not None:
            raise RuntimeError(f"the node did not get ready:\n{self.output()}")
        took_s = time.perf_counter() - self.started_at
        self.look()
        return took_s

    def metric(self, name: str, **labels: str) -> float:
        """Return one metric, summed over the series whose labels include `labels`; 0 if there is none."""
        return metric(self.get("/metrics")[1].decode(), name, **labels)

    def end(self) -> None:
        """Kill whatever is left of it, and remove what it would leave."""
        everything = self.alive()
        for seen in everything:
            with suppress(ProcessLookupError):
                os.kill(seen.pid, signal.SIGKILL)
        self.process.wait(10)
        wait_until(lambda: not self.alive(), 5.0)
        for name in self.names:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def metric(text: str, name: str, **labels: str) -> float:
    """Return one metric of a scrape, summed over the series whose labels include `labels`."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = (line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(each in line for each in wanted))


def _mapped(pid: int) -> set[str]:
    with suppress(OSError):
        lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
        found = {line.partition(f"{SHARED_MEMORY}/")[2] for line in lines if f"{SHARED_MEMORY}/" in line}
        return {name for name in found if name and not name.endswith(" (deleted)")}
    return set()


def _die_with_us() -> None:
    """Make the kernel end the node if whoever measures it is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def started(
    arguments: Sequence[str], output: IO[bytes] | int, environment: Mapping[str, str], prefix: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a node or a launcher, a session of its own, that logs to `output`; `environment` is added to our own.

    `prefix` is a command that runs what follows it, such as `prlimit`.
    """
    own = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "supervisor", *arguments],
        cwd=ROOT,
        env={**own, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_die_with_us,  # noqa: PLW1509  # one system call, and no lock is taken
    )


@contextmanager
def place() -> Iterator[Path]:
    """Make a short folder for nodes, and remove it: Unix sockets have short names only."""
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
    gateway: str = "",
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    output: int | None = None,
) -> Iterator[Node]:
    """Start a node that keeps its files under `folder`, and end it whatever happens in the body.

    Two nodes of one folder, one after the other, share their TMPDIR: the second sweeps what the first left. `engine`
    and `gateway` are what the configuration says of them beside slots and port; `environment` is added to our own. The
    node writes to a file, or to the descriptor `output`; `prefix` is a command that runs it, such as `prlimit`.
    """
    port, tmp, logs = free_port(), folder / "t", folder / "logs"
    for each in (tmp, logs):
        each.mkdir(exist_ok=True)
    cluster = folder / f"{port}.toml"
    cluster.write_text(
        CLUSTER.format(
            drain_s=drain_s,
            logs=logs,
            port=port,
            model=MODEL,
            path=ROOT / "examples" / MODEL,
            slots=slots,
            engine=engine,
            gateway=gateway,
        )
    )
    mark = f"{os.getpid()}-{port}"
    with (folder / "output").open("wb") as file:
        given = {"TMPDIR": str(tmp), MARK: mark, **(environment or {})}
        process = started([str(cluster)], file if output is None else output, given, prefix)
    made = Node(process, port, folder, tmp, mark, time.perf_counter())
    try:
        if ready:
            made.wait_ready()
        yield made
    finally:
        made.end()
