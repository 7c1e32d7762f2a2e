"""The same pictures again and again: what the encoder's cache saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.pictures.senders import Tally, send_all
from bench.pictures.setup import running
from bench.rig.cluster import FRONT, Cluster
from bench.rig.media_load import TEMPLATE, ended_children_cpu_s
from bench.rig.node import metric
from bench.rig.pictures import data_url, jpeg
from bench.rig.processes import exact_cpu_s
from bench.rig.vision_cluster import ENCODER

PICTURES, TIMES, CLIENTS = 50, 20, 2
SIZE = 1024, 768
SLACK = 0.01  # of hits: all but the first time of each picture
OUTCOMES = ("encoded", "cached", "shared")
DECODERS, ENGINES = "decoders", "engines"
CPU_PARTS = (FRONT, DECODERS, ENCODER, ENGINES)


@dataclass(frozen=True)
class Run:
    """The measurements of one run."""

    outcomes: dict[str, float]
    picture_s: float
    cpu_s: dict[str, float]  # of a picture, by the part
    tally: Tally

    @property
    def hit_rate(self) -> float:
        """The share of pictures whose embeddings were there."""
        return 1 - self.outcomes["encoded"] / sum(self.outcomes.values())


def cpu_s(target: Cluster) -> dict[str, float]:
    """Return the CPU time that each part of the cluster has used."""
    used = dict.fromkeys(CPU_PARTS, 0.0)
    for name, node in target.nodes.items():
        for entry in node.living():
            part = DECODERS if TEMPLATE in entry.command else name if name in used else ENGINES
            used[part] += exact_cpu_s(entry.pid) + ended_children_cpu_s(entry.pid)
    return used


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the names and URLs of all pictures, all of them in each round."""
    urls = [data_url(jpeg(*SIZE, number)) for number in range(PICTURES)]
    for _ in range(TIMES):
        yield from ((str(number), url) for number, url in enumerate(urls))


def run(folder: Path, name: str, cache_bytes_max: int | None) -> Run:
    """Send all pictures, and return what that took."""
    encoder = {} if cache_bytes_max is None else {"cache_bytes_max": cache_bytes_max}
    with running(folder / name, encoder=encoder, step_s=0.002) as target:
        warm = data_url(jpeg(*SIZE, PICTURES))
        send_all(target.front.port, iter([("warm", warm)] * 4), CLIENTS, Tally())
        encoders = target.nodes[ENCODER]
        text, tally = encoders.get("/metrics")[1].decode(), Tally()
        before = {outcome: metric(text, "espalier_encoder_requests_total", outcome=outcome) for outcome in OUTCOMES}
        used_s, began_at = cpu_s(target), time.perf_counter()
        send_all(target.front.port, pictures(), CLIENTS, tally)
        took_s, count = time.perf_counter() - began_at, PICTURES * TIMES
        cpu = {part: (now_s - used_s[part]) / count for part, now_s in cpu_s(target).items()}
        text = encoders.get("/metrics")[1].decode()
        outcomes = {
            outcome: metric(text, "espalier_encoder_requests_total", outcome=outcome) - before[outcome]
            for outcome in OUTCOMES
        }
        assert not target.wait_idle(10.0)
        assert not target.stop(20.0)
    return Run(outcomes, took_s * CLIENTS / count, cpu, tally)


def measure(folder: Path) -> list[str]:
    """Print what the cache saves, and return what is wrong."""
    times = f"{TIMES} times each, {CLIENTS} at a time; times of a picture in ms"
    print(f"{PICTURES} pictures of {SIZE[0]} x {SIZE[1]}, {times}")
    counts = f"{'encoded':>9}{'cached':>8}{'shared':>8}{'hits':>8}"
    print(f"{'cache':<10}{counts}{'time':>8}{'  CPU:':<6}{''.join(f'{part:>10}' for part in (*CPU_PARTS, 'all'))}")
    runs = {name: run(folder, name, size) for name, size in (("without", 0), ("with", None))}
    for name, each in runs.items():
        encoded, *others = (each.outcomes[outcome] for outcome in OUTCOMES)
        counts = f"{encoded:>9g}" + "".join(f"{number:>8g}" for number in others)
        cpu = "".join(f"{1000 * used_s:>10.1f}" for used_s in (*each.cpu_s.values(), sum(each.cpu_s.values())))
        print(f"{name:<10}{counts}{each.hit_rate:>8.1%}{1000 * each.picture_s:>8.1f}{'':<6}{cpu}")
    wrong = [f"{each.tally.failed} pictures were not answered" for each in runs.values() if each.tally.failed]
    if runs["with"].hit_rate < 1 - 1 / TIMES - SLACK:
        wrong.append(f"of the pictures that were sent again only {runs['with'].hit_rate:.1%} were in the cache")
    if any(runs["with"].tally.texts[name] != texts for name, texts in runs["without"].tally.texts.items()):
        wrong.append("a picture was answered in another way with the cache")
    return wrong
