"""The price of tensors to an engine's process, attached and in shared memory: `python -m tests.system.tensor_roads`.

Two real processes: one asks as a node does, the other answers each tensor with as many bytes, as an engine's host. So
each message counts its bytes twice, once in each direction. Printed are the bytes a second, and the processor time of
either process for a megabyte.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import trio
from attrs import frozen

from protocol.media import Encode, Encoded
from tests.rig.tensor_process import ATTACHED, SHARED, HostProcess, host_process
from tests.rig.tensors import pixels

SIZES = (64 * 1024, 512 * 1024, 2 * 1024 * 1024, 40 * 1024 * 1024)
MEGABYTES = 400  # in each direction, for each figure
MB = 1_000_000


@frozen
class Figures:
    """One road at one size."""

    megabytes_a_second: float
    node_ms: float  # of processor time a megabyte
    host_ms: float
    message_ms: float  # from the request to its result


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(host: HostProcess, request: Encode) -> None:
    """Send one tensor and wait until one of its size is back."""
    async with host.link.ask(request, 0) as answer:
        result = await answer.result()
    assert isinstance(result, Encoded)


async def measure(road: str, size: int, megabytes: float) -> Figures:
    """Return the figures of one road for tensors of one size, one message at a time."""
    request = Encode("a", pixels(-(-size // 12) * 12))  # whole pixels, and whole elements of the result
    async with host_process(road=road, lease_s=30.0) as host:
        for _ in range(3):
            await ask(host, request)
        times = max(3, int(megabytes * MB / size))
        before, began = (time.process_time(), cpu_s(host.process.pid)), time.perf_counter()
        for _ in range(times):
            await ask(host, request)
        took_s = time.perf_counter() - began
        node_s, host_s = time.process_time() - before[0], cpu_s(host.process.pid) - before[1]
    crossed = 2 * times * size / MB
    return Figures(crossed / took_s, 1000 * node_s / crossed, 1000 * host_s / crossed, 1000 * took_s / times)


def main() -> None:
    """Print the figures of both roads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=MEGABYTES)
    asked = parser.parse_args()
    out = sys.stdout.write
    out(f"{'bytes':>10} {'road':>9} {'MB/s':>8} {'node ms/MB':>11} {'host ms/MB':>11} {'ms a message':>13}\n")
    for size in SIZES:
        for road in (ATTACHED, SHARED):
            found = trio.run(measure, road, size, asked.megabytes)
            out(f"{size:>10} {road:>9} {found.megabytes_a_second:>8.0f} {found.node_ms:>11.2f} {found.host_ms:>11.2f}")
            out(f" {found.message_ms:>13.2f}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
