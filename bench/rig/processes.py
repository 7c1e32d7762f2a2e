"""Processes of this machine as `/proc` shows them: state, memory, descriptors, threads and who started them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
CPUCLOCK_SCHED = 2  # of the kernel's clocks of a process, the one that its scheduler keeps
MARK = "ESPALIER_BENCH"  # in the environment of everything that a node starts


@dataclass(frozen=True)
class ProcessEntry:
    """One process when it was read from `/proc`."""

    pid: int
    parent: int
    session: int
    started: str
    state: str
    command: str

    @property
    def lives(self) -> bool:
        """Whether it still runs; a zombie does not."""
        now = process_entry(self.pid)
        return now is not None and now.started == self.started and now.state not in "ZX"


def process_entry(pid: int, proc: Path = PROC) -> ProcessEntry | None:
    """Return the entry of a process, None if there is none."""
    folder = proc / str(pid)
    try:
        name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    return ProcessEntry(pid, int(fields[1]), int(fields[3]), fields[19], fields[0], command or name)


@dataclass(frozen=True)
class Usage:
    """The resources used by a process and its running threads since its start."""

    user_s: float  # of the two, only the sum is exact
    system_s: float  # in the kernel's ticks
    voluntary: int  # context switches: it waited for something
    involuntary: int  # another process was given the processor
    memory_max_mb: float  # the peak of its resident memory

    @property
    def cpu_s(self) -> float:
        """Its CPU time."""
        return self.user_s + self.system_s


def usage(pid: int, proc: Path = PROC) -> Usage:
    """Return what a process has used; raises `OSError` if there is none."""
    folder = proc / str(pid)
    ticks_a_s = os.sysconf("SC_CLK_TCK")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    voluntary = involuntary = 0
    for thread in (folder / "task").iterdir():
        with suppress(OSError):  # it has ended
            counts = _numbers((thread / "status").read_text())
            voluntary += counts["voluntary_ctxt_switches"]
            involuntary += counts["nonvoluntary_ctxt_switches"]
    memory_max_kb = _numbers((folder / "status").read_text()).get("VmHWM", 0)
    user_s, system_s = (int(ticks) / ticks_a_s for ticks in fields[11:13])
    if proc == PROC:  # a tick of 10 ms is a tenth of what some loads take
        with suppress(OSError):
            user_s = max(0.0, exact_cpu_s(pid) - system_s)
    return Usage(user_s, system_s, voluntary, involuntary, memory_max_kb / 1024)


def exact_cpu_s(pid: int) -> float:
    """Return the CPU time of a process and all its threads, ended ones included, in nanoseconds' steps.

    Raises `OSError` if there is no such process. The number of its clock is that of `clock_getcpuclockid`.
    """
    return time.clock_gettime_ns((~pid << 3) | CPUCLOCK_SCHED) / 1e9


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    return usage(pid).cpu_s


def process_table(proc: Path = PROC) -> list[ProcessEntry]:
    """Return every process that `/proc` shows to this one."""
    numbers = (int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())
    return [entry for pid in numbers if (entry := process_entry(pid, proc)) is not None]


def family(table: Iterable[ProcessEntry], pids: Iterable[int]) -> list[ProcessEntry]:
    """Return the living processes of a table that these are, have started, or have in their sessions."""
    living = [entry for entry in table if entry.state not in "ZX"]
    ours = set(pids)
    while more := {entry.pid for entry in living if entry.parent in ours or entry.session in ours} - ours:
        ours |= more
    return [entry for entry in living if entry.pid in ours]


def was_marked(pid: int, mark: str) -> bool:
    """Whether a process was started with this value of `MARK` in its environment."""
    try:
        return f"{MARK}={mark}\0".encode() in (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def memory_bytes(pid: int, kind: str = "Pss", proc: Path = PROC) -> int:
    """Return the memory of a process, by default its proportional share of what it shares (`Pss`)."""
    return _numbers((proc / str(pid) / "smaps_rollup").read_text()).get(kind, 0) * 1024


def memory_max_mb(pid: int) -> float:
    """Return the peak of a process's resident memory, in MB."""
    return usage(pid).memory_max_mb


def _numbers(text: str) -> dict[str, int]:
    """Return the lines `NAME: NUMBER ...` of a file of `/proc`; sizes are in kB."""
    pairs = (line.partition(":")[::2] for line in text.splitlines())
    return {name: int(words[0]) for name, rest in pairs if (words := rest.split()) and words[0].isdigit()}


def open_files(pid: int) -> int:
    """Return the number of file descriptors that a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def threads(pid: int) -> int:
    """Return the number of threads of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())


def shared_memory_names(pid: int) -> set[str]:
    """Return the names under `/dev/shm` that a process has mapped."""
    with suppress(OSError):
        lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
        names = {line.partition(f"{SHARED_MEMORY}/")[2] for line in lines if f"{SHARED_MEMORY}/" in line}
        return {name for name in names if name and not name.endswith(" (deleted)")}
    return set()
