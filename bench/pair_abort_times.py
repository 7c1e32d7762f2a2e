"""How long after a client has left its request is out of both engines of a pair, by the engines' own counts.

A front, a prefill and a decode, three processes. For each try a client leaves at one stage of its request, and the
`/metrics` of both workers, which read their engine's count anew at each scrape, are polled over connections that are
kept. The time is that of the first scrape after which both engines held nothing of the request for good: no place, and
no KV memory. Polling goes on until the front has ended the request as well and `SETTLE_S` have passed, as an engine
that has not yet heard of a request counts nothing either. Nothing is subtracted for the polling; its period is printed.

A request that waits at the gateway or for a worker is in no engine: its time is that of the front's own count, and both
engines must have gone on with what they had. Of a lane the engine's place is looked for, as its neighbours hold KV
memory. How many tries really met their stage is printed; a miss counts all the same. A real engine tells nothing while
it computes a prompt: there the moments before the first token are chosen by time, and all that is known of them is that
the first token had not come.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from random import Random

from bench._client import STORY, Chat, Outcome, Running, Socket, chat_body, response_body
from bench._cluster import COUNTS, Cluster, Plan, cluster, sglang, simulated
from bench._node import metric, place, wait_until
from bench.abort_times import first_token, prompt_of

TARGET_P90_MS = {"simulated": 20.0, "sglang": 100.0}
PREFILL, DECODE = "prefill", "decode"
TOKENS = 1000  # more than any try lets its answer have
LONG = 1500  # tokens of a prompt whose prefill can be met
SHORT = 8
PIECES = 10
LANES = ("a", "b", "c")
SETTLE_S = 0.15
PAUSE_S = 0.001  # between two polls
GIVE_UP_S = 15.0
REACHED_S = 5.0
COSTS = {"fixed_s": 0.02, "per_prefill_token_s": 0.0001, "transfer_s": 0.15}


def plan(engine: str, *, narrow: bool) -> Plan:
    """Return a pair with room for everybody, or one with one place behind a gate with two."""
    slots = 1 if narrow else 16
    legs = (PREFILL, DECODE)
    if engine == "simulated":
        engines = {leg: simulated(leg, leg, slots=slots, costs=COSTS) for leg in legs}
    else:
        engines = {leg: sglang(leg, slots=slots) for leg in legs}
    return Plan(engines, gateway="requests_max = 2\nadmit_s = 60.0\n" if narrow else "")


# What the nodes count --------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """One scrape of every node."""

    prefill: dict[str, float]
    decode: dict[str, float]
    running: float  # of the front
    waiting: float

    @property
    def idle(self) -> bool:
        """Whether neither engine holds anything."""
        return not any(self.prefill.values()) and not any(self.decode.values())


@dataclass
class Poll:
    """Reads what the nodes count as fast as they answer."""

    of: Cluster
    periods: list[float] = field(default_factory=list)
    _connections: dict[str, HTTPConnection] = field(default_factory=dict)

    def _scrape(self, name: str) -> str:
        if name not in self._connections:
            self._connections[name] = HTTPConnection("127.0.0.1", self.of.nodes[name].port, timeout=GIVE_UP_S)
        self._connections[name].request("GET", "/metrics")
        return self._connections[name].getresponse().read().decode()

    def _engine(self, name: str) -> dict[str, float]:
        text = self._scrape(name)
        assert f"espalier_engine_{COUNTS[0]}{{" in text, f"the engine of {name} does not say what it holds"
        return {each: metric(text, f"espalier_engine_{each}") for each in COUNTS}

    def look(self) -> Counts:
        """Scrape every node once; the front comes last, as it is the last to let go."""
        start = time.perf_counter()
        prefill, decode, front = self._engine(PREFILL), self._engine(DECODE), self._scrape("front")
        self.periods.append(time.perf_counter() - start + PAUSE_S)
        running, waiting = (metric(front, f"espalier_requests_{each}") for each in ("running", "waiting"))
        return Counts(prefill, decode, running, waiting)

    def wait(self, holds: Callable[[Counts], bool], within_s: float = REACHED_S) -> bool:
        """Wait until the counts are so; return whether they were."""
        return wait_until(lambda: holds(self.look()), within_s, PAUSE_S) is not None

    def until(self, free: Callable[[Counts], bool], quiet: Callable[[Counts], bool], since: float) -> float:
        """Return how long after `since` the counts were `free` for good, in seconds; once `quiet`, it is."""
        free_at, quiet_since = None, None
        while True:
            counts, now = self.look(), time.perf_counter()
            free_at = (free_at or now) if free(counts) else None
            quiet_since = (quiet_since or now) if free_at is not None and quiet(counts) else None
            if free_at is not None and quiet_since is not None and now - quiet_since > SETTLE_S:
                return free_at - since
            if now - since > GIVE_UP_S:
                raise RuntimeError(f"{GIVE_UP_S} s after its client had left, a request was still there: {counts}")
            time.sleep(PAUSE_S)

    def close(self) -> None:
        """Close its connections."""
        for each in self._connections.values():
            each.close()


# One try: come to a stage, leave, and say when -------------------------------------------


@dataclass
class Scene:
    """What a try has at hand."""

    of: Cluster
    poll: Poll
    chance: Random
    tells: bool  # whether an engine that computes a prompt tells its counts meanwhile
    first_token_s: float = 0.0  # of a long prompt
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def port(self) -> int:
        """Where clients knock."""
        return self.of.front.port

    def prompt(self, tokens: int) -> str:
        """Return a prompt that no cache knows."""
        return prompt_of(tokens, next(self.numbers))


@contextmanager
def asked(scene: Scene, tokens: int, **options: object) -> Iterator[Chat]:
    """Ask, and read in another thread until the body ends."""
    chat = Chat(scene.port, chat_body(scene.prompt(tokens), TOKENS, **options))
    running = Running(chat.read if options.get("stream", True) else partial(_answer, chat))
    try:
        yield chat
    finally:
        chat.leave()
        running.wait(GIVE_UP_S)
        chat.close()


def _answer(chat: Chat) -> Outcome:
    with suppress(OSError, HTTPException):
        chat.connection.getresponse()  # which does not come: the client leaves before
    return chat.outcome


def _left(*chats: Chat) -> float:
    left_at = time.perf_counter()
    for chat in chats:
        chat.leave()
    return left_at


def idle_after(scene: Scene, left_at: float) -> float:
    """Wait until both engines are idle for good."""
    return scene.poll.until(lambda now: now.idle, lambda now: now.running == 0, left_at)


def prefill_running(scene: Scene) -> tuple[float, bool]:
    """Leave while the prefill computes the prompt."""
    with asked(scene, LONG) as chat:
        met = True
        if scene.tells:
            met = scene.poll.wait(lambda now: now.prefill["running"] > 0)
            time.sleep(scene.chance.uniform(0.0, 0.5) * (scene.first_token_s - COSTS["transfer_s"]))
        else:
            time.sleep(scene.chance.uniform(0.1, 0.6) * scene.first_token_s)
        met = met and chat.outcome.first_at is None
        return idle_after(scene, _left(chat)), met


def in_transfer(scene: Scene) -> tuple[float, bool]:
    """Leave when the prefill has computed the prompt, and the decode has not begun to answer."""
    with asked(scene, LONG) as chat:

        def handed(now: Counts) -> bool:
            return not any(now.prefill.values()) and any((now.decode["running"], now.decode["waiting"]))

        met = True
        if scene.tells:
            met = scene.poll.wait(lambda now: now.prefill["running"] > 0) and scene.poll.wait(handed)
        else:
            time.sleep(scene.chance.uniform(0.85, 1.0) * scene.first_token_s)
        met = met and chat.outcome.first_at is None
        return idle_after(scene, _left(chat)), met


def waits_for_kv(scene: Scene) -> tuple[float, bool]:
    """Leave, together with two who came before, while the decode has a place and the prefill is at the others."""
    with ExitStack() as stack:
        chats = [stack.enter_context(asked(scene, LONG)) for _ in range(3)]
        met = scene.poll.wait(lambda now: now.decode["running"] + now.decode["waiting"] >= len(chats))
        met = met and chats[-1].outcome.first_at is None
        return idle_after(scene, _left(*reversed(chats))), met


def streaming(scene: Scene, **options: object) -> tuple[float, bool]:
    """Leave in the middle of an answer, or of several."""
    with asked(scene, SHORT, **options) as chat:
        met = wait_until(lambda: chat.outcome.pieces >= PIECES, REACHED_S) is not None
        return idle_after(scene, _left(chat)), met


def not_streaming(scene: Scene) -> tuple[float, bool]:
    """Leave in the middle of an answer that comes in one piece."""
    with asked(scene, SHORT, stream=False) as chat:
        met = scene.poll.wait(lambda now: now.decode["running"] > 0)
        time.sleep(scene.chance.uniform(0.1, 0.4) + COSTS["transfer_s"])
        return idle_after(scene, _left(chat)), met


def one_lane(scene: Scene) -> tuple[float, bool]:
    """Take one of three responses of a WebSocket back while all of them are being answered."""
    with closing(Socket(scene.port)) as socket:
        for lane in LANES:
            socket.send(response_body(scene.prompt(SHORT), TOKENS) | {"stream_id": lane})
        begun: set[str] = set()
        outcome = Outcome()
        for event in socket.events(outcome):
            if event["type"] == "response.output_text.delta":
                begun.add(event["stream_id"])
            if len(begun) == len(LANES):
                break
        met = scene.poll.wait(lambda now: now.decode["running"] == len(LANES))
        left_at = time.perf_counter()
        socket.send({"type": "response.cancel", "stream_id": scene.chance.choice(LANES)})
        others = len(LANES) - 1

        def free(now: Counts) -> bool:
            return now.decode["running"] == others and now.prefill["running"] + now.prefill["waiting"] == 0

        took_s = scene.poll.until(free, lambda now: now.running == others, left_at)
        socket.leave()
    idle_after(scene, time.perf_counter())
    return took_s, met


@contextmanager
def full(scene: Scene) -> Iterator[None]:
    """Hold the one place while the body runs."""
    with asked(scene, SHORT) as chat:
        assert wait_until(lambda: chat.outcome.pieces > 0, REACHED_S) is not None, "the one place was not given"
        yield
        assert chat.outcome.ended_at == 0.0, "the one place was free before the end"
    idle_after(scene, time.perf_counter())


def waits_for_worker(scene: Scene) -> tuple[float, bool]:
    """Leave while the router waits for a place in the pair."""
    with full(scene), asked(scene, SHORT) as chat:
        met = scene.poll.wait(lambda now: now.running == 2 and _only_the_first(now))
        left_at = _left(chat)
        return scene.poll.until(_only_the_first, lambda now: now.running == 1, left_at), met


def at_the_gate(scene: Scene) -> tuple[float, bool]:
    """Leave while the gateway is full."""
    with full(scene), asked(scene, SHORT), asked(scene, SHORT) as chat:
        met = scene.poll.wait(lambda now: now.waiting == 1 and _only_the_first(now))
        left_at = _left(chat)
        return scene.poll.until(lambda now: now.waiting == 0, _only_the_first, left_at), met


def _only_the_first(now: Counts) -> bool:
    return now.running <= 2 and now.decode["running"] == 1 and now.decode["waiting"] == now.prefill["running"] == 0


Try = Callable[[Scene], tuple[float, bool]]
NARROW: dict[str, Try] = {"queued at the gateway": at_the_gate, "waiting for a worker": waits_for_worker}
WIDE: dict[str, Try] = {
    "prefill running": prefill_running,
    "KV in transfer": in_transfer,
    "decode waiting for KV": waits_for_kv,
    "streaming": streaming,
    "one lane of several": one_lane,
    "non-streaming": not_streaming,
    "n = 3": partial(streaming, n=3),
}


# All of them -----------------------------------------------------------------------------


def row(scene: Scene, name: str, try_one: Try, tries: int, target_ms: float) -> bool:
    """Print how one stage went; return whether it missed the target."""
    found = [try_one(scene) for _ in range(tries)]
    taken = sorted(1000 * took_s for took_s, _ in found)
    met = sum(each for _, each in found)
    p50, p90 = statistics.median(taken), taken[min(len(taken) - 1, int(0.9 * len(taken)))]
    verdict = "" if p90 < target_ms else f"  p90 over {target_ms:g}"
    print(f"{name:<24}{tries:>7}{met:>6}{p50:>8.1f}{p90:>8.1f}{taken[-1]:>8.1f}{verdict}", flush=True)
    return p90 >= target_ms


def tell(folder: Path, engine: str, stages: dict[str, Try], tries: int, *, narrow: bool) -> int:
    """Try all stages of one kind of cluster; return how many missed the target, and how much was left behind."""
    folder.mkdir()
    with cluster(folder, plan(engine, narrow=narrow)) as of, closing(Poll(of)) as poll:
        scene = Scene(of, poll, Random(20), tells=engine == "simulated")
        for _ in range(2):
            Chat(scene.port, chat_body(STORY, 16)).read()  # a first request is slower than any other
        if not narrow:
            scene.first_token_s, size = first_token(of.front, LONG)
            print(f"    (a first token of {size} tokens takes {1000 * scene.first_token_s:.0f} ms)")
        idle_after(scene, time.perf_counter())
        bad = sum(row(scene, name, each, tries, TARGET_P90_MS[engine]) for name, each in stages.items())
        periods = sorted(1000 * each for each in poll.periods)
        print(f"    (polled every {statistics.median(periods):.1f} ms, p90 {periods[int(0.9 * len(periods))]:.1f} ms)")
        left = of.wait_idle(5.0) + of.stop(20.0)
        for each in left:
            print(f"LEAKED: {each}")
    return bad + len(left)


def main() -> int:
    """Print the table; return 1 if a p90 misses its target or something was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=TARGET_P90_MS, default="simulated")
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--only", default="", help="part of a stage's name")
    arguments = parser.parse_args()
    print(f"from the client's close to its request out of both {arguments.engine} engines, in ms")
    print(f"{'stage':<24}{'tries':>7}{'met':>6}{'p50':>8}{'p90':>8}{'max':>8}")
    bad = 0
    with place() as folder:
        for narrow, every in ((True, NARROW), (False, WIDE)):
            if stages := {name: each for name, each in every.items() if arguments.only in name}:
                where = folder / ("narrow" if narrow else "wide")
                bad += tell(where, arguments.engine, stages, arguments.tries, narrow=narrow)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
