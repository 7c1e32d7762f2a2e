"""What groups of processes spent, from the text that `/proc` has of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.cost import accounts
from bench.rig.processes import exact_cpu_s, family, process_table, usage

TICKS_A_S = os.sysconf("SC_CLK_TCK")
MB = 1024  # of the kB that the files count in


def write(
    proc: Path,
    pid: int,
    command: str,
    *,
    parent: int = 1,
    session: int = 1,
    state: str = "S",
    started: int = 100,
    ticks: tuple[int, int] = (0, 0),
    threads: Sequence[tuple[int, int]] = ((0, 0),),
    peak_mb: int = 0,
    memory_mb: int = 0,
) -> None:
    """Write the files of one process; `threads` has the context switches of each."""
    folder = proc / str(pid)
    (folder / "task").mkdir(parents=True, exist_ok=True)
    times = f"{ticks[0]} {ticks[1]}"
    rest = f"{state} {parent} 0 {session} 0 0 0 0 0 0 0 {times} 0 0 20 0 {len(threads)} 0 {started} 0"
    (folder / "stat").write_text(f"{pid} (a (name) of it) {rest}")
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (folder / "status").write_text(f"Name:\ta\nVmPeak:\t999 kB\nVmHWM:\t{peak_mb * MB} kB\n")
    (folder / "smaps_rollup").write_text(f"5500-7f00 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss: {memory_mb * MB} kB\n")
    for number, (voluntary, involuntary) in enumerate(threads):
        (folder / "task" / str(pid + number)).mkdir(exist_ok=True)
        counts = f"voluntary_ctxt_switches:\t{voluntary}\nnonvoluntary_ctxt_switches:\t{involuntary}\n"
        (folder / "task" / str(pid + number) / "status").write_text(f"Name:\ta\nVmHWM:\t1 kB\n{counts}")


def test_the_usage_of_a_process_is_of_all_its_threads(tmp_path: Path) -> None:
    write(tmp_path, 7, "a", ticks=(3 * TICKS_A_S, TICKS_A_S), threads=[(5, 1), (20, 2)], peak_mb=300)
    (tmp_path / "7" / "task" / "99").mkdir()  # a thread that ends while it is read
    found = usage(7, tmp_path)
    assert (found.user_s, found.system_s, found.cpu_s) == (3.0, 1.0, 4.0)
    assert (found.voluntary, found.involuntary, found.memory_max_mb) == (25, 3, 300)


def test_the_cpu_time_of_a_living_process_is_finer_than_a_tick() -> None:
    outer_s, before_s, inner_s = time.process_time(), usage(os.getpid()).cpu_s, time.process_time()
    while time.process_time() - inner_s < 0.0012:
        pass
    took_s = usage(os.getpid()).cpu_s - before_s
    assert 0.0012 <= took_s <= time.process_time() - outer_s + 0.001, "what other threads took may come late"
    with pytest.raises(OSError):
        exact_cpu_s(2**22 + 1)


def test_a_family_is_the_roots_what_they_started_and_their_sessions(tmp_path: Path) -> None:
    write(tmp_path, 10, "root", session=10)
    write(tmp_path, 11, "child", parent=10, session=11)
    write(tmp_path, 12, "grandchild", parent=11, session=11)
    write(tmp_path, 13, "orphan of the grandchild's session", parent=1, session=11)
    write(tmp_path, 14, "dead", parent=10, session=10, state="Z")
    write(tmp_path, 20, "other", session=20)
    (tmp_path / "uptime").touch()
    assert [entry.pid for entry in sorted(family(process_table(tmp_path), [10]), key=lambda e: e.pid)] == [
        10,
        11,
        12,
        13,
    ]


def test_a_group_spent_the_difference_of_its_processes_accounts(tmp_path: Path) -> None:
    server = "python -m sglang.launch_server"
    write(tmp_path, 10, server, session=10, ticks=(100, 50), threads=[(10, 1)], peak_mb=500)
    write(tmp_path, 11, "sglang::scheduler", parent=10, ticks=(1000, 0), threads=[(0, 0)])
    before = accounts.take([10], tmp_path)
    write(tmp_path, 10, server, session=10, ticks=(300, 60), threads=[(30, 4)], peak_mb=600, memory_mb=200)
    write(tmp_path, 11, "sglang::scheduler", parent=10, ticks=(1700, 0), memory_mb=400)
    write(tmp_path, 12, "sglang::detokenizer", parent=10, ticks=(40, 0), memory_mb=50)  # begun meanwhile
    spent = accounts.spent(before, accounts.take([10], tmp_path, memory=True))
    assert list(spent) == ["detokenizer", "scheduler", "server"]
    assert (spent["server"].user_s * TICKS_A_S, spent["server"].system_s * TICKS_A_S) == pytest.approx((200, 10))
    assert (spent["server"].voluntary, spent["server"].involuntary) == (20, 3)
    assert (spent["server"].memory_max_mb, spent["server"].memory_mb) == (600, 200)
    assert spent["scheduler"].cpu_s * TICKS_A_S == pytest.approx(700)
    assert spent["detokenizer"].cpu_s * TICKS_A_S == pytest.approx(40)
    assert accounts.total(spent.values()).memory_mb == 650


def test_another_process_with_an_ended_ones_number_has_spent_all_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, 10, "a", session=10, ticks=(500, 0), started=100)
    before = accounts.take([10], tmp_path)
    write(tmp_path, 10, "a", session=10, ticks=(30, 0), started=900)
    after = accounts.take([10], tmp_path)
    assert accounts.ended(before, after) == 1
    assert accounts.spent(before, after)["a"].cpu_s * TICKS_A_S == pytest.approx(30)


def test_a_process_that_ends_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 10, "a", session=10)
    write(tmp_path, 11, "b", parent=10)
    (tmp_path / "11" / "status").unlink()
    assert set(accounts.take([10], tmp_path)) == {10}
