"""Text streams beside pictures: does anybody notice them?"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from bench.load.measure import summarise
from bench.pictures.senders import Tally, sending
from bench.pictures.setup import running
from bench.rig.cluster import Cluster
from bench.rig.load_run import load
from bench.rig.pictures import commented, data_url, noise_jpeg

STREAMS, SENDERS = 64, 32
PICTURE_BYTES = 2_000_000
SIZE = 2400, 1800
RATIO_MAX = 1.5
TOKENS = 160


def gap_ms(folder: Path, target: Cluster, *, tokens: int = TOKENS) -> float:
    """Return the 99th percentile of the gap between two tokens of the text streams."""
    options = ("--api", "chat", "--clients", STREAMS, "--requests", STREAMS, "--warmup", STREAMS)
    lengths = ("--ignore-eos", "--output-tokens", tokens, "--prompt-tokens", 32)
    report = load(folder, target.front.port, *options, *lengths)
    assert report["requests"]["completed"] == STREAMS, report["requests"]
    value: float = report["latencies"]["itl"]["p99"]
    return value


def measure(folder: Path, times: int) -> list[str]:
    """Print the gaps of each run, and return what is wrong with them."""
    gaps: dict[bool, list[float]] = {False: [], True: []}
    picture, tally = noise_jpeg(*SIZE, PICTURE_BYTES, 1), Tally()

    def another(number: int) -> str:
        return data_url(commented(picture, str(number).encode()))

    print(f"{STREAMS} text streams, and {SENDERS} clients that send pictures of {len(picture):,} bytes: gap p99 in ms")
    with running(folder / "streams") as target:
        for turn in range(times):
            gaps[False].append(gap_ms(folder, target))
            before = len(tally.times_s)
            with sending(target.front.port, another, SENDERS, tally):
                gaps[True].append(gap_ms(folder, target))
            values = f"alone {gaps[False][-1]:.1f}, beside {gaps[True][-1]:.1f}"
            print(f"run {turn + 1}: {values} ({len(tally.times_s) - before} pictures)", flush=True)
        wrong = target.wait_idle(10.0) + target.stop(20.0)
    alone, beside = (median(values) for values in gaps.values())
    times_s = summarise(tally.times_s)
    print(f"medians: alone {alone:.1f} ms, beside {beside:.1f} ms: {beside / alone:.2f} times; allowed {RATIO_MAX}")
    print(f"pictures: {dict(tally.outcomes)}, p50 {times_s.p50:.2f} s, p99 {times_s.p99:.2f} s")
    if beside > RATIO_MAX * alone:
        wrong.append(f"the gap beside pictures is {beside / alone:.2f} times that without")
    if tally.failed:
        wrong.append(f"{tally.failed} pictures were not answered")
    return wrong
