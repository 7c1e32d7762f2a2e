"""Processes of this machine as `/proc` shows them: state, memory, descriptors, threads and who started them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
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


def process_entry(pid: int) -> ProcessEntry | None:
    """Return the entry of a process, None if there is none."""
    folder = Path("/proc") / str(pid)
    try:
        name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    return ProcessEntry(pid, int(fields[1]), int(fields[3]), fields[19], fields[0], command or name)


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_table() -> list[ProcessEntry]:
    """Return every process that `/proc` shows to this one."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [entry for pid in numbers if (entry := process_entry(pid)) is not None]


def was_marked(pid: int, mark: str) -> bool:
    """Whether a process was started with this value of `MARK` in its environment."""
    try:
        return f"{MARK}={mark}\0".encode() in (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def memory_bytes(pid: int, kind: str = "Pss") -> int:
    """Return the memory of a process, by default its proportional share of what it shares (`Pss`)."""
    return _kilobytes(pid, "smaps_rollup", kind) * 1024


def memory_max_mb(pid: int) -> float:
    """Return the peak of a process's resident memory, in MB."""
    return _kilobytes(pid, "status", "VmHWM") / 1024


def _kilobytes(pid: int, file: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


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
