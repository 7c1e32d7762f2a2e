"""The time from a client's disconnect until nothing of its request with a picture is left anywhere.

A front that fetches and decodes, an encoder, a prefill and a decode: four processes, and real decoders; the engines are
simulated. In each try a client disconnects at one stage before its answer (`bench/media_stages.py`), and the `/metrics`
of the front and of the encoder's node are polled. The time is that of the first poll from which on all counts were 0
for good: the budgets of the media actor, its decoders' processes, items at the encoder, tensors and streams on links,
slots, KV memory, and connections to the picture's server. A batch that an encoder computes cannot be stopped in its
middle, so `encoding` has the rest of one: up to 100 ms. Where others wait at the encoder, the time is that until
nothing more is held than before the request.

Nothing is subtracted for the polling, whose period is printed. The column `reached` counts the tries that disconnected
in their stage. After the tries of a stage the descriptors, the files in memory and the threads of every node must be as
many as before, and nothing may be left under /dev/shm.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench.load.measure import summarise
from bench.media_stages import NARROW, NODES, SMALL, WIDE, Scene, Stage, plan
from bench.pair_abort_times import cores
from bench.rig.clients import Chat
from bench.rig.cluster import Cluster, cluster
from bench.rig.media_load import MediaPoller, Remains, remains
from bench.rig.node import short_folder, wait_until
from bench.rig.pictures import picture_body
from bench.rig.polling import RequestNotReleased
from bench.rig.slow_server import SlowServer
from bench.rig.vision_cluster import DECODE, PREFILL
from bench.rig.vision_model import FACTOR, write_vision_model

TARGET_P99_MS = 250.0
REACHED_SHARE_MIN = 0.9  # of the tries of a stage: with fewer, its figures say little
LEFT_WITHIN_S = 15.0  # threads close freed descriptors, and Trio keeps an idle thread for 10 s
HEAD = f"{'stage':<36}{'tries':>6}{'reached':>9}{'p50':>8}{'p99':>8}{'max':>8}  left"


@dataclass
class Report:
    """The results so far."""

    rows: list[str] = field(default_factory=list)
    periods: list[float] = field(default_factory=list)
    ran_s: float = 0.0  # of all nodes' event loops together
    waited_s: float = 0.0  # for which they were runnable without a core
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, tries: list[tuple[float, bool]], left: list[str]) -> None:
        """Add the tries of one stage, and what was left after them."""
        times = summarise((took_s for took_s, _ in tries), 1000)
        assert times.p99 is not None
        reached = sum(in_stage for _, in_stage in tries)
        figures = f"{times.count:>6}{reached:>9}{times.p50:>8.1f}{times.p99:>8.1f}{times.most:>8.1f}"
        self.rows.append(f"{name:<36}{figures}  {'; '.join(left) or 'nothing'}")
        if times.p99 >= TARGET_P99_MS:
            self.wrong.append(f"{name}: p99 over {TARGET_P99_MS:g} ms")
        if reached < REACHED_SHARE_MIN * len(tries):
            self.wrong.append(f"{name}: only {reached} of {len(tries)} tries disconnected in their stage")
        self.wrong += [f"{name}: left {each}" for each in left]

    def conditions(self) -> str:
        """Return how often the nodes were polled, and how busy the machine was."""
        periods = summarise(self.periods, 1000)
        polled = f"polled every {periods.p50:.1f} ms, p90 {periods.p90:.1f} ms"
        return f"{polled}; nodes ran {self.ran_s:.1f} s and waited {self.waited_s:.1f} s for a core"


def left_of(target: Cluster, poll: MediaPoller, before: dict[str, Remains]) -> list[str]:
    """Return a sentence for each thing that is there now, at rest, and was not before."""
    wait_until(lambda: all(remains(target.nodes[name]).within(before[name]) for name in NODES), LEFT_WITHIN_S, 0.1)
    beyond = [f"{name}: {each}" for name in NODES for each in remains(target.nodes[name]).beyond(before[name])]
    return poll.read((PREFILL, DECODE)).sentences() + beyond


def measure(folder: Path, report: Report, stages: dict[str, Stage], tries: int, *, narrow: bool) -> None:
    """Try some stages on one cluster, until a request is not released."""
    folder.mkdir()
    files = folder / "files"
    files.mkdir()
    model = write_vision_model(folder / "model", pixels_max=128 * 128 * FACTOR**2)
    with closing(SlowServer()) as server, cluster(folder, plan(model, files, server, narrow=narrow)) as target:
        with closing(MediaPoller(target, outside=lambda: float(server.connections), periods=report.periods)) as poll:
            scene = Scene(target, poll, server, files, Random(20))
            for _ in range(2):  # a first request is slower than any other
                Chat(target.front.port, picture_body(scene.picture(*SMALL), tokens_max=4)).read()
            for stage in stages.values():
                stage(scene)
            poll.until_idle(time.perf_counter())
            before = {name: remains(target.nodes[name]) for name in NODES}
            ran_s, waited_s = cores(target)
            for name, stage in stages.items():
                try:
                    results = [stage(scene) for _ in range(tries)]
                except RequestNotReleased as error:
                    report.wrong.append(f"{name}: {error}")
                    break
                report.add(name, results, left_of(target, poll, before))
                print(report.rows[-1], file=sys.stderr, flush=True)
            report.ran_s += cores(target)[0] - ran_s
            report.waited_s += cores(target)[1] - waited_s
        report.wrong += target.wait_idle(5.0) + target.stop(20.0)


def main() -> int:
    """Print the table; return 1 if a p99 misses its target or anything is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--stages", default="", help="part of their names")
    arguments = parser.parse_args()
    report = Report()
    with short_folder() as folder:
        for narrow, all_stages in ((False, WIDE), (True, NARROW)):
            if stages := {name: stage for name, stage in all_stages.items() if arguments.stages in name}:
                measure(folder / ("narrow" if narrow else "wide"), report, stages, arguments.tries, narrow=narrow)
    print("From the client's close until nothing of its request is left, in ms.")
    print(HEAD)
    print(*report.rows, sep="\n")
    print(f"({report.conditions()})")
    for sentence in report.wrong:
        print(f"MISSED: {sentence}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
