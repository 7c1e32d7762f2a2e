"""One run of a load tool: its figures, what the server's access log says of the same requests, and the tool's CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from attrs import define, field, frozen

from bench.agree.tools import Figures, Load, Tool
from bench.peers.running import Running
from bench.rig.node import start_command
from bench.rig.processes import cpu_s, family, process_table
from bench.rig.result import percentile

RUN_WITHIN_S = 300.0
POLL_S = 0.25
OUTPUT_SHOWN = 2000
ENDED = "request ended"


class Failed(Exception):
    """A tool did not measure the load, and why."""


class Line(msgspec.Struct):
    """One line of a node's log, as far as it is needed."""

    event: str = ""
    api: str = ""
    outcome: str = ""
    duration_s: float = 0.0
    first_token_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


@frozen
class Run:
    """The results of one run; `server` has the access log's figures, by the same names."""

    tool: str
    clients: int
    figures: Figures
    server: Figures
    prompt_tokens: float
    cores: float  # that the tool used while its requests were answered


@define
class Watch:
    """The CPU time of a process and all that it has started, between the first and last growth of a file."""

    pid: int
    file: Path
    _size: int = field(init=False)
    _first: tuple[float, float] | None = None  # the time, and the CPU time so far
    _last: tuple[float, float] | None = None
    _used: dict[int, float] = field(factory=dict)  # of each process, also of those that have ended

    def __attrs_post_init__(self) -> None:
        self._size = self.file.stat().st_size

    def look(self) -> None:
        """Add up the CPU time so far, and keep it if the file has grown."""
        for entry in family(process_table(), [self.pid]):
            with suppress(OSError):  # it has ended
                self._used[entry.pid] = cpu_s(entry.pid)
        if (size := self.file.stat().st_size) > self._size:
            self._size = size
            self._last = (time.perf_counter(), sum(self._used.values()))
            self._first = self._first or self._last

    @property
    def cores(self) -> float:
        """The share of one core; 0 if the file grew less than twice."""
        if self._first is None or self._last is None or self._first == self._last:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


def run(tool: Tool, load: Load, server: Running, folder: Path, environments: Path) -> Run:
    """Let a tool send a load; raises `Failed`."""
    folder.mkdir(parents=True)
    log = server.setup.folder / "node.log"
    offset = log.stat().st_size
    output = folder / "output"
    with _started(tool.words(load, folder, tool.python(environments)), output, tool.variables) as process:
        watch = Watch(process.pid, log)
        deadline = time.perf_counter() + RUN_WITHIN_S
        while process.poll() is None and time.perf_counter() < deadline:
            watch.look()
            time.sleep(POLL_S)
    output_end = output.read_text(errors="replace")[-OUTPUT_SHOWN:]
    if process.returncode != 0:
        raise Failed(f"{tool.title} exited with {process.returncode}\n{output_end}")
    try:
        figures = tool.read(folder)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise Failed(f"{tool.title} left no results: {error!r}\n{output_end}") from error
    requests = answered(log.read_bytes()[offset:], load)
    return Run(
        tool=tool.name,
        clients=load.clients,
        figures=figures,
        server=server_figures(requests),
        prompt_tokens=sum(line.prompt_tokens for line in requests) / len(requests),
        cores=watch.cores,
    )


def answered(log: bytes, load: Load) -> list[Line]:
    """Return the lines of a load's requests, those of its warm-up left out; raises `Failed` if it was another load."""
    lines = (msgspec.json.decode(line, type=Line) for line in log.splitlines() if line.startswith(b"{"))
    requests = [line for line in lines if line.event == ENDED and line.api == "chat"][-load.requests :]
    whole = [line for line in requests if line.outcome == "length" and line.completion_tokens == load.output_tokens]
    if len(whole) < load.requests:
        wanted = f"{load.requests} whole answers of {load.output_tokens} tokens"
        raise Failed(f"the server's log should end with {wanted}, and has {len(whole)} of them")
    return whole


def server_figures(requests: list[Line]) -> Figures:
    """Return the figures that the access log has: from the request's head to the sending of its events."""
    first = sorted(1e3 * line.first_token_s for line in requests if line.first_token_s is not None)
    return {
        "first token p50 ms": percentile(first, 50),
        "first token p99 ms": percentile(first, 99),
        "request p50 ms": percentile(sorted(1e3 * line.duration_s for line in requests), 50),
    }


@contextmanager
def _started(words: list[str], output: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a tool in a session of its own, and end whatever is left of it."""
    with output.open("wb") as file:
        process = start_command(words, file, variables)
    try:
        yield process
    finally:
        for entry in family(process_table(), [process.pid]):
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGKILL)
        process.wait(RUN_WITHIN_S)
