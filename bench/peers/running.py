"""A started server: its processes, found ready, asked, and always ended with all that they started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from attrs import define, field

from bench.peers.install import is_installed
from bench.peers.peer import MODEL, Command, Peer, Setup
from bench.rig.node import start_command, wait_until
from bench.rig.processes import SHARED_MEMORY, ProcessEntry, family, process_table, shared_memory_names

READY_WITHIN_S = 180.0
STOP_WITHIN_S = 20.0
ASK_WITHIN_S = 10.0
POLL_S = 0.1
OUTPUT_SHOWN = 3000  # characters of a log, where a server did not start


class NotStarted(Exception):
    """A server cannot be measured, and why."""


class NotReady(NotStarted):
    """A server did not become ready; the end of what it wrote."""


class PeerModels(msgspec.Struct):
    """The answer of `/v1/models`, as far as it is needed."""

    class Entry(msgspec.Struct):
        """One model."""

        id: str

    data: list[Entry] = []


@define(eq=False)
class Running:
    """One server, from the start of its processes until all of them have ended."""

    peer: Peer
    setup: Setup
    commands: Sequence[Command] = ()
    roots: dict[str, subprocess.Popen[bytes]] = field(factory=dict)  # by the names of its commands
    started_at: float = field(factory=time.perf_counter)
    _observed: dict[int, str] = field(factory=dict)  # when each process of it so far was started, by its pid
    _shared_memory: set[str] = field(factory=set)

    @property
    def url(self) -> str:
        """Its root, without a path."""
        return f"http://127.0.0.1:{self.setup.port}"

    @property
    def model(self) -> str:
        """The name by which its model is asked for."""
        return MODEL

    @property
    def root_pids(self) -> list[int]:
        """The processes that were started here; the others are below them."""
        return [process.pid for process in self.roots.values()]

    def ended(self) -> list[str]:
        """Return the names of its processes that have ended."""
        return [name for name, process in self.roots.items() if process.poll() is not None]

    def output(self, name: str) -> str:
        """Return what one of its processes has written so far."""
        return (self.setup.folder / f"{name}.log").read_text(errors="replace")

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """Return status and body of a request without a body; status 0 without an answer."""
        return ask(method, f"{self.url}{path}")

    def metrics(self) -> str:
        """Return the text of its metrics, empty without an answer."""
        return self.ask("GET", "/metrics")[1].decode()

    def is_ready(self) -> bool:
        """Whether it can be asked now."""
        if self.peer.ready_path is not None:
            return self.ask("GET", self.peer.ready_path)[0] == 200
        status, body = self.ask("GET", "/v1/models")
        try:
            return status == 200 and any(entry.id == MODEL for entry in msgspec.json.decode(body, type=PeerModels).data)
        except msgspec.DecodeError:  # as long as it is starting
            return False

    def start(self, command: Command) -> None:
        """Start one of its processes, or start it again."""
        if command.name in self.roots:
            self.processes()  # what the last one has left behind is found by its session now, and later as observed
        temporary = self.setup.folder / "t"
        temporary.mkdir(exist_ok=True)
        with (self.setup.folder / f"{command.name}.log").open("ab") as output:
            self.roots[command.name] = start_command(command.words, output, _variables(command, temporary))

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> float:
        """Return how long after its start it was ready; raises `NotReady`."""
        took_s = wait_until(lambda: self.ended() or self.is_ready(), within_s, POLL_S)
        if took_s is None or (ended := self.ended()):
            names = ended if took_s is not None else list(self.roots)
            logs = "\n".join(f"{name}:\n{self.output(name)[-OUTPUT_SHOWN:]}" for name in names)
            raise NotReady(f"{self.peer.title} did not get ready\n{logs}")
        took_s = time.perf_counter() - self.started_at
        for url in (url for command in self.commands for url in command.posts):
            ask("POST", url)
        return took_s

    def processes(self) -> list[ProcessEntry]:
        """Return its living processes: the roots, their descendants and sessions, and those observed before."""
        table = process_table()
        observed = (entry.pid for entry in table if self._observed.get(entry.pid) == entry.started)
        living = family(table, (*self.root_pids, *observed))
        for entry in living:
            self._observed[entry.pid] = entry.started
            self._shared_memory |= shared_memory_names(entry.pid)
        return living

    def shared_memory(self) -> list[str]:
        """Return the present names under `/dev/shm` among the past mappings of its processes."""
        return sorted(name for name in self._shared_memory if (SHARED_MEMORY / name).exists())

    def stop(self, within_s: float = STOP_WITHIN_S) -> float | None:
        """Send SIGTERM to all roots; return after how many seconds no process lived, None if one had to be killed."""
        self.processes()
        for process in self.roots.values():
            process.send_signal(signal.SIGTERM)
        took_s = wait_until(lambda: len(self.ended()) == len(self.roots) and not self.processes(), within_s, POLL_S)
        self.end()
        return took_s

    def end(self) -> None:
        """Kill every process of it that lives, and remove their shared memory."""
        for entry in self.processes():
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)
        for process in self.roots.values():
            process.wait(STOP_WITHIN_S)
        wait_until(lambda: not self.processes(), STOP_WITHIN_S, POLL_S)
        for name in self._shared_memory:
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def ask(method: str, url: str) -> tuple[int, bytes]:
    """Return status and body of a request without a body; status 0 without an answer."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with closing(HTTPConnection(parts.hostname, parts.port, timeout=ASK_WITHIN_S)) as connection:
        try:
            connection.request(method, parts.path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, HTTPException):
            return 0, b""


def _variables(command: Command, temporary: Path) -> Mapping[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**offline, "TMPDIR": str(temporary), **command.variables}


def missing_environments(peer: Peer, setup: Setup) -> list[str]:
    """Return the environments of a peer that are not installed, or from another list than today's."""
    return [name for name in peer.environments if not is_installed(name, setup.environments)]


@contextmanager
def started(peer: Peer, setup: Setup, *, ready: bool = True) -> Iterator[Running]:
    """Start a server, and end it with the body; raises `NotStarted`.

    Unless it waits until the server is `ready`, the body calls `wait_ready`.
    """
    if missing := missing_environments(peer, setup):
        raise NotStarted(f"{peer.title}: run python -m bench peers install {' '.join(missing)}")
    if setup.workers > peer.workers_max:
        raise NotStarted(f"{peer.title} has at most {peer.workers_max} engines, not {setup.workers}")
    setup.folder.mkdir(parents=True, exist_ok=True)
    commands = peer.commands(setup)
    running = Running(peer, setup, commands)
    try:
        for command in commands:
            running.start(command)
        if ready:
            running.wait_ready()
        yield running
    finally:
        running.end()
        shutil.rmtree(setup.folder / "t", ignore_errors=True)
