"""The memory that may still be taken here is the machine's, or the rest of the tightest control group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from supervisor.launcher.host_memory import available_bytes

GIB = 2**30
MACHINE = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n"}


def v2(folder: str, limit: object, used: int, cached: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}".rstrip("/")
    stat = f"anon 5\ninactive_file {cached}\n"
    return {f"{at}/memory.max": f"{limit}\n", f"{at}/memory.current": f"{used}\n", f"{at}/memory.stat": stat}


def v1(folder: str, limit: int, used: int, cached: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    names = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}
    return {f"{at}/{name}": f"{value}\n" for name, value in names.items()} | {
        f"{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}\n"
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64 * GIB),
        ({"proc/self/cgroup": "0::/\n"}, 64 * GIB),
        ({"proc/self/cgroup": "0::/\n"} | v2("", 4 * GIB, GIB), 3 * GIB),
        ({"proc/self/cgroup": "0::/\n"} | v2("", 4 * GIB, 3 * GIB, 2 * GIB), 3 * GIB),
        ({"proc/self/cgroup": "0::/\n"} | v2("", "max", GIB), 64 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n"} | v2("a", 4 * GIB, GIB) | v2("a/b", "max", GIB), 3 * GIB),
        ({"proc/self/cgroup": "0::/a/b\n"} | v2("a", 4 * GIB, GIB) | v2("a/b", 2 * GIB, GIB), GIB),
        ({"proc/self/cgroup": "0::/of/the/host\n"} | v2("", 4 * GIB, GIB), 3 * GIB),
        ({"proc/self/cgroup": "5:cpu:/x\n4:memory:/a\n0::/\n"} | v1("a", 4 * GIB, 2 * GIB, GIB), 3 * GIB),
        ({"proc/self/cgroup": "4:memory:/of/the/host\n"} | v1("", 4 * GIB, 2 * GIB), 2 * GIB),
        ({"proc/self/cgroup": "4:memory:/a\n"} | v1("a", 2**63 - 4096, 2 * GIB), 64 * GIB),
        ({"proc/self/cgroup": "0::/\n"} | v2("", GIB, 2 * GIB), 0),
    ],
)
def test_it_is_the_least_of_the_machine_and_of_each_group_around(
    tmp_path: Path, files: Mapping[str, str], expected: int
) -> None:
    for name, text in {**MACHINE, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == expected


def test_it_is_unknown_without_files_of_the_kernel(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_this_machine_has_some() -> None:
    assert (available_bytes() or 0) > 0
