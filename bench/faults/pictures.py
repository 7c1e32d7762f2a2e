"""The cost of pictures to others and to the machine: for text streams beside them, and in memory.

On a front that fetches and decodes, an encoder, a prefill and a decode, each a process of its own. Text streams run
alone, and while other clients send pictures, in turns: beside pictures the 99th percentile of the gap between two
tokens may be 1.5 times as long.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Lock

from bench.faults.growth import Sample, grow, sample
from bench.faults.polling import TEMPLATE
from bench.faults.scenario import Run, check
from bench.faults.slowdown import attacking, compare, gap_ms
from bench.rig.clients import Chat
from bench.rig.cluster import Cluster, cluster
from bench.rig.pictures import commented, data_url, jpeg, noise_jpeg, picture_body
from bench.rig.vision_cluster import simulated_plan
from bench.rig.vision_model import FACTOR, write_vision_model

PIXELS_MAX = 1280 * FACTOR**2  # of a picture as the model sees it: the default of its family
WIDTH = 1536  # elements of an embedding, as in a model of 2B parameters
ENCODING_COSTS = {"fixed_s": 0.002, "per_item_s": 0.005}
STEP_S, FAST_STEP_S = 0.05, 0.002  # 20 tokens a second for each stream
STREAMS, SENDERS, TOKENS = 64, 32, 160
NOISY, PICTURE_BYTES = (2400, 1800), 2_000_000
REMEMBERED = 640, 480
CLIENTS = 4
CACHE_BYTES_MAX = 16 * 1024 * 1024  # full long before the warm-up ends
REST_S = 1.5  # in which a node collects its garbage, as no request runs


@contextmanager
def running(folder: Path, encoder: Mapping[str, object] | None = None, step_s: float = STEP_S) -> Iterator[Cluster]:
    """Run a cluster of simulated engines; `encoder` has keys of that table."""
    folder.mkdir()
    plan = simulated_plan(
        write_vision_model(folder / "model", pixels_max=PIXELS_MAX),
        slots=128,
        encoder=encoder,
        encoding_costs=ENCODING_COSTS,
        costs={"fixed_s": step_s, "per_prefill_token_s": 0.0, "per_running_s": 0.0},
        width=WIDTH,
    )
    with cluster(folder, plan) as target:
        yield target


@dataclass
class Sent:
    """The outcomes of pictures so far, sent by clients with a thread each."""

    port: int
    outcomes: Counter[str] = field(default_factory=Counter)  # `whole`, or the code of an error
    lock: Lock = field(default_factory=Lock)

    def send(self, url: str) -> None:
        """Ask about one picture, and count its answer."""
        try:
            outcome = Chat(self.port, picture_body(url, tokens_max=4)).read()
            ended = "whole" if outcome.whole else str((outcome.error or {}).get("code"))
        except OSError as error:
            ended = type(error).__name__
        with self.lock:
            self.outcomes[ended] += 1

    def send_until(self, urls: Iterator[str], over: Event) -> None:
        """Send pictures one after the other until `over` is set."""
        while not over.is_set():
            with self.lock:
                url = next(urls)
            self.send(url)

    def conclude(self, run: Run) -> None:
        """Check that each was answered."""
        run.check({*self.outcomes} <= {"whole"}, f"not every picture was answered: {dict(self.outcomes)}")


def streams(run: Run) -> None:
    """Compare the gaps of text streams beside pictures with those alone."""
    picture = noise_jpeg(*NOISY, PICTURE_BYTES, 1)
    urls = (data_url(commented(picture, str(number).encode())) for number in count())
    with running(run.folder / "streams") as target:
        sent = Sent(target.front.port)

        def alone() -> float:
            return gap_ms(run.folder, target.front, STREAMS, TOKENS, "chat")

        def beside() -> float:
            with attacking(lambda over: sent.send_until(urls, over), threads=SENDERS):
                return alone()

        compare(run, f"{SENDERS} clients that send pictures of {len(picture):,} bytes", alone, beside, 0.0)
        run.wrong += target.wait_idle(10.0) + target.stop(20.0)
    sent.conclude(run)


# Memory ----------------------------------------------------------------------------------


def processes(target: Cluster) -> dict[str, int]:
    """Return the processes of all nodes by names."""
    found: dict[str, int] = {}
    for name, node in target.nodes.items():
        for entry in node.living():
            role = name if entry.pid == node.pid else f"{name} {'decoders' if TEMPLATE in entry.command else 'other'}"
            found.setdefault(role, entry.pid)
    return found


def at_rest(target: Cluster) -> Sample:
    """Measure every process, at rest."""
    check(not target.wait_idle(20.0), "20 s after the last answer a request is held")
    time.sleep(REST_S)
    return sample(processes(target))


def memory(run: Run) -> None:
    """Send many different pictures, and compare the samples."""
    number = run.options.pictures
    with running(run.folder / "memory", {"cache_bytes_max": CACHE_BYTES_MAX}, FAST_STEP_S) as target:
        sent = Sent(target.front.port)

        def send(begin: int, end: int) -> None:
            with ThreadPoolExecutor(CLIENTS) as pool:
                list(pool.map(sent.send, (data_url(jpeg(*REMEMBERED, each)) for each in range(begin, end))))

        send(number, number + 2 * CLIENTS)
        grow(run, number, send, lambda: at_rest(target))
        run.wrong += target.wait_idle(10.0) + target.stop(20.0)
    sent.conclude(run)
