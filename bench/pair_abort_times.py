"""The time from a client's disconnect until its request is out of both engines of a pair, by their own counts.

A front, a prefill and a decode, three processes. In each try a client disconnects at one stage of its request
(`bench/pair_stages.py`), and the `/metrics` of a worker is polled, which asks both engines for their counts at each
scrape. The time is that of the first scrape from which on both engines held nothing of the request: no slot, and no KV
memory. Nothing is subtracted for the polling, whose period is printed, nor for other work of the machine: the time for
which the nodes waited for a core is printed, and where it is near to the time that they ran, or above, the figures are
the machine's. The column `reached` counts the tries that disconnected in their stage, by the counts just before; the
others count all the same.

A request that waits at the gateway or for a worker is in no engine: its time is by the front's own counts, and both
engines must have continued with their requests. For a lane only the engine's slot is counted, as its neighbours hold KV
memory. What the engines hold after the tries of a stage has leaked, in requests and in KV tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench.abort_times import first_token
from bench.load.measure import summarise
from bench.pair_stages import LONG, NARROW, WIDE, Scene, Stage, plan
from bench.rig.clients import Chat, chat_body
from bench.rig.cluster import Cluster, cluster
from bench.rig.node import short_folder
from bench.rig.polling import LoadPoller, PairLoad, RequestNotReleased
from bench.rig.prompts import STORY_PROMPT

TARGET_P90_MS = {"simulated": 20.0, "sglang": 100.0}
PAUSE_S = {"simulated": 0.001, "sglang": 0.004}  # between two scrapes; a real engine computes on the same cores


@dataclass
class Report:
    """The results of one kind of engine."""

    kind: str
    rows: list[str] = field(default_factory=list)
    periods: list[float] = field(default_factory=list)
    ran_s: float = 0.0  # of all nodes' event loops together
    waited_s: float = 0.0  # for which they were runnable without a core
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, tries: list[tuple[float, bool]], left: PairLoad) -> None:
        """Add the tries of one stage, and the load that was left after them."""
        times = summarise((took_s for took_s, _ in tries), 1000)
        assert times.p90 is not None
        reached, target = sum(in_stage for _, in_stage in tries), TARGET_P90_MS[self.kind]
        verdict = "" if times.p90 < target else f"  p90 over {target:g}"
        leaked = f"{left.places} / {left.kv_tokens}"
        figures = f"{times.count:>6}{reached:>9}{times.p50:>8.1f}{times.p90:>8.1f}{times.most:>8.1f}{leaked:>9}"
        self.rows.append(f"{self.kind:<11}{name:<24}{figures}{verdict}")
        if verdict:
            self.wrong.append(f"{name}: p90 over {target:g} ms")
        if not left.idle:
            self.wrong.append(f"{name}: leaked {leaked}")

    def conditions(self) -> str:
        """Return how often the engines were polled, and how busy the machine was."""
        periods = summarise(self.periods, 1000)
        polled = f"polled every {periods.p50:.1f} ms, p90 {periods.p90:.1f} ms"
        return f"{self.kind}: {polled}; nodes ran {self.ran_s:.1f} s and waited {self.waited_s:.1f} s for a core"


def cores(target: Cluster) -> tuple[float, float]:
    """Return for how long the nodes' event loops have run so far, and have waited for a core."""
    stats = [(Path("/proc") / str(each.pid) / "schedstat").read_text().split() for each in target.nodes.values()]
    return sum(int(ran_ns) for ran_ns, _, _ in stats) / 1e9, sum(int(waited_ns) for _, waited_ns, _ in stats) / 1e9


HEAD = f"{'engines':<11}{'stage':<24}{'tries':>6}{'reached':>9}{'p50':>8}{'p90':>8}{'max':>8}{'leaked':>9}"


def measure(folder: Path, report: Report, stages: dict[str, Stage], tries: int, *, narrow: bool) -> None:
    """Try some stages on one cluster, until a request is not released."""
    folder.mkdir()
    kind = report.kind
    with (
        cluster(folder, plan(kind, narrow=narrow)) as target,
        closing(LoadPoller(target, PAUSE_S[kind], report.periods)) as poll,
    ):
        scene = Scene(target, poll, Random(20))
        for _ in range(2):
            Chat(scene.port, chat_body(STORY_PROMPT, 16)).read()  # a first request is slower than any other
        if not narrow:
            scene.long = first_token(target.front, LONG)[1]
        poll.until_idle(time.perf_counter())
        ran_s, waited_s = cores(target)
        for name, stage in stages.items():
            try:
                results = [stage(scene) for _ in range(tries)]
            except RequestNotReleased as error:
                report.wrong.append(f"{name}: {error}")
                break
            report.add(name, results, poll.read())
            print(report.rows[-1], file=sys.stderr, flush=True)
        report.ran_s += cores(target)[0] - ran_s
        report.waited_s += cores(target)[1] - waited_s
        report.wrong += target.wait_idle(5.0) + target.stop(20.0)


def report_of(folder: Path, kind: str, part: str, tries: int) -> Report:
    """Return the results of the stages whose name has `part` with one kind of engine."""
    report = Report(kind)
    for narrow, all_stages in ((True, NARROW), (False, WIDE)):
        if stages := {name: stage for name, stage in all_stages.items() if part in name}:
            measure(folder / f"{kind[:3]}-{'narrow' if narrow else 'wide'}", report, stages, tries, narrow=narrow)
    return report


def main() -> int:
    """Print the table; return 1 if a p90 misses its target or a request has leaked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=(*TARGET_P90_MS, "both"), default="both")
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--stages", default="", help="part of their names")
    arguments = parser.parse_args()
    kinds = tuple(TARGET_P90_MS) if arguments.kind == "both" else (arguments.kind,)
    with short_folder() as folder:
        reports = [report_of(folder, kind, arguments.stages, arguments.tries) for kind in kinds]
    print("From the client's close to its request out of both engines of a pair, in ms; leaked: requests / KV tokens.")
    print(HEAD)
    for report in reports:
        print(*report.rows, sep="\n")
    for report in reports:
        print(f"({report.conditions()})")
        for sentence in report.wrong:
            print(f"MISSED: {report.kind}: {sentence}")
    return 1 if any(report.wrong for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
