"""How long after a client has left its request is out of both engines of a pair, by the engines' own counts.

A front, a prefill and a decode, three processes. For each try a client leaves at one stage of its request, and the
`/metrics` of a worker, which asks both engines for their counts anew at each scrape, is polled. The time is that of the
first answer after which both engines held nothing of the request for good: no place, and no KV memory. Nothing is
subtracted for the polling; its period is printed, and how often tries met their stage by what was counted just before.
A miss counts all the same. Nor is anything subtracted for other work of the machine: how long the nodes waited for a
core is printed, and where that is near to what they ran, or above, the times are the machine's and not theirs.

A request that waits at the gateway or for a worker is in no engine: its time is that of the front's own count, and both
engines must have gone on with what they had. Of a lane the engine's place is looked for, as its neighbours hold KV
memory. What is left in the engines after a stage's tries is leaked, in places and in KV tokens.

Between engines of one host a KV cache is there before anybody could leave. So each transfer takes `TRANSFER_S`: by the
costs of the simulated engine, and by `ESPALIER_TRANSFER_DELAY_S` of the real one
(`actors/engines/sglang/host/transfer_delay.py`). A real engine publishes its count at each step here, where by default
it would at every fifteenth.
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
from http.client import HTTPException
from itertools import count
from pathlib import Path
from random import Random

from bench.abort_times import first_token, prompt_of
from bench.rig.clients import BackgroundReader, Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.cluster import Cluster, Plan, cluster, node_engine_name, sglang, simulated
from bench.rig.node import place, wait_until
from bench.rig.polling import DECODE, GIVE_UP_S, PREFILL, REACHED_S, LoadPoller, PairLoad, RequestNotReleased
from bench.rig.prompts import STORY_PROMPT

TARGET_P90_MS = {"simulated": 20.0, "sglang": 100.0}
PAUSE_S = {"simulated": 0.001, "sglang": 0.004}  # between two looks: a real engine computes on the same cores
TOKENS = 1000  # more than any try lets its answer have
LONG = 1500  # tokens of a prompt whose prefill can be met
CHUNK = 256  # tokens of a prompt that a step computes
SHORT = 8
PIECES = 10
LANES = ("a", "b", "c")
TRANSFER_S = 0.15
COSTS = {"fixed_s": 0.01, "per_prefill_token_s": 0.00005}
HELD = """\
prefill_chunk = {chunk}
[engine.{name}.environment]
ESPALIER_TRANSFER_DELAY_S = "{held_s}"
[engine.{name}.settings]
load_snapshot_publish_interval = 1
"""


def plan(kind: str, *, narrow: bool, transfer_s: float = TRANSFER_S) -> Plan:
    """Return a pair with room for everybody, or one with one place behind a gate with two."""
    slots = 1 if narrow else 16
    legs = (PREFILL, DECODE)
    if kind == "simulated":
        costs = COSTS | {"transfer_s": transfer_s}
        engines = {leg: simulated(leg, leg, slots=slots, costs=costs, prefill_chunk=CHUNK) for leg in legs}
    else:
        held = {leg: HELD.format(name=node_engine_name(leg), chunk=CHUNK, held_s=transfer_s) for leg in legs}
        engines = {leg: sglang(leg, slots=slots) + held[leg] for leg in legs}
    return Plan(engines, gateway="requests_max = 2\nadmit_s = 60.0\n" if narrow else "")


# One try: come to a stage, leave, and say when -------------------------------------------


@dataclass
class Scene:
    """The cluster and clients of one try."""

    target: Cluster
    poll: LoadPoller
    chance: Random
    long: int = 0  # tokens that a long prompt really has
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def port(self) -> int:
        """Where clients knock."""
        return self.target.front.port

    def prompt(self, tokens: int) -> str:
        """Return a prompt that no cache knows."""
        return prompt_of(tokens, next(self.numbers))

    def computed(self, now: PairLoad) -> bool:
        """Whether a long prompt that the prefill has had is computed; one that was handed over is out of it."""
        kv_tokens = now.prefill["kv_tokens_used"]
        return now.prefill["running"] == 0 and (kv_tokens == 0 or kv_tokens >= self.long)


@contextmanager
def asked(scene: Scene, tokens: int, **options: object) -> Iterator[Chat]:
    """Ask, and read in another thread until the body ends."""
    chat = Chat(scene.port, chat_body(scene.prompt(tokens), TOKENS, **options))
    running = BackgroundReader(chat.read if options.get("stream", True) else partial(_answer, chat))
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


def prefill_running(scene: Scene) -> tuple[float, bool]:
    """Leave while the prefill computes the prompt, some pieces after its begin."""
    pieces = CHUNK * scene.chance.randrange(4)
    with asked(scene, LONG) as chat:
        met = scene.poll.wait(lambda now: any(now.prefill.values()) and now.prefill["kv_tokens_used"] >= pieces)
        met = met and chat.outcome.first_at is None
        return scene.poll.until_idle(_left(chat)), met


def in_transfer(scene: Scene) -> tuple[float, bool]:
    """Leave when the prefill has computed the prompt, and the decode has not begun to answer."""
    with asked(scene, LONG) as chat:

        def handed(now: PairLoad) -> bool:
            return scene.computed(now) and any(now.decode.values())

        met = scene.poll.wait(lambda now: any(now.prefill.values())) and scene.poll.wait(handed)
        time.sleep(scene.chance.uniform(0.0, 0.5) * TRANSFER_S)
        met = met and chat.outcome.first_at is None
        return scene.poll.until_idle(_left(chat)), met


def waits_for_kv(scene: Scene) -> tuple[float, bool]:
    """Leave, together with two who came before, while the decode has a place and the prefill is at the others."""
    with ExitStack() as stack:
        chats = [stack.enter_context(asked(scene, LONG)) for _ in range(3)]
        met = scene.poll.wait(lambda now: now.decode["running"] + now.decode["waiting"] >= len(chats))
        met = met and chats[-1].outcome.first_at is None
        return scene.poll.until_idle(_left(*reversed(chats))), met


def streaming(scene: Scene, n: int = 1) -> tuple[float, bool]:
    """Leave in the middle of an answer, or of several at once."""
    with asked(scene, SHORT, n=n) as chat:
        met = wait_until(lambda: chat.outcome.pieces >= PIECES, REACHED_S) is not None
        met = met and scene.poll.wait(lambda now: now.decode["running"] == n)
        return scene.poll.until_idle(_left(chat)), met


def not_streaming(scene: Scene) -> tuple[float, bool]:
    """Leave in the middle of an answer that comes in one piece."""
    with asked(scene, SHORT, stream=False) as chat:
        met = scene.poll.wait(lambda now: now.decode["running"] > 0)
        time.sleep(TRANSFER_S + scene.chance.uniform(0.05, 0.2))  # a simulated decode runs before the transfer ends
        return scene.poll.until_idle(_left(chat)), met


def one_lane(scene: Scene) -> tuple[float, bool]:
    """Take one of three responses of a WebSocket back while all of them are being answered."""
    with closing(ResponsesSocket(scene.port)) as socket:
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

        def free(now: PairLoad) -> bool:
            return now.decode["running"] == others and now.prefill["running"] + now.prefill["waiting"] == 0

        took_s = scene.poll.until(free, lambda now: now.running == others, left_at)
        socket.leave()
    scene.poll.until_idle(time.perf_counter())
    return took_s, met


@contextmanager
def full(scene: Scene) -> Iterator[None]:
    """Hold the one place while the body runs."""
    with asked(scene, SHORT) as chat:
        assert wait_until(lambda: chat.outcome.pieces > 0, REACHED_S) is not None, "the one place was not given"
        yield
        assert chat.outcome.ended_at == 0.0, "the one place was free before the end"
    scene.poll.until_idle(time.perf_counter())


def _only_the_first(now: PairLoad) -> bool:
    return now.decode["running"] == 1 and now.decode["waiting"] == now.prefill["running"] == now.prefill["waiting"] == 0


def waits_for_worker(scene: Scene) -> tuple[float, bool]:
    """Leave while the router waits for a place in the pair."""
    with full(scene), asked(scene, SHORT) as chat:
        met = scene.poll.wait(lambda now: now.running == 2 and _only_the_first(now), front=True)
        left_at = _left(chat)
        return scene.poll.until(lambda now: now.running == 1, _only_the_first, left_at, front=True), met


def at_the_gate(scene: Scene) -> tuple[float, bool]:
    """Leave while the gateway is full."""
    with full(scene), asked(scene, SHORT), asked(scene, SHORT) as chat:
        met = scene.poll.wait(lambda now: now.waiting == 1 and _only_the_first(now), front=True)
        left_at = _left(chat)
        return scene.poll.until(lambda now: now.waiting == 0, _only_the_first, left_at, front=True), met


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


@dataclass
class Report:
    """The results of one kind of engines."""

    kind: str
    rows: list[str] = field(default_factory=list)
    periods: list[float] = field(default_factory=list)
    ran_s: float = 0.0  # all nodes' event loops together
    waited_s: float = 0.0  # when they could run, and had no core
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, found: list[tuple[float, bool]], left: PairLoad) -> None:
        """Note how one stage went, and what was left after it."""
        taken = sorted(1000 * took_s for took_s, _ in found)
        met, target = sum(each for _, each in found), TARGET_P90_MS[self.kind]
        p50, p90 = statistics.median(taken), taken[min(len(taken) - 1, int(0.9 * len(taken)))]
        verdict = "" if p90 < target else f"  p90 over {target:g}"
        leaked = f"{left.places} / {left.kv_tokens}"
        self.rows.append(
            f"{self.kind:<11}{name:<24}{len(taken):>6}{met:>6}{p50:>8.1f}{p90:>8.1f}{taken[-1]:>8.1f}{leaked:>9}{verdict}"
        )
        if verdict:
            self.wrong.append(f"{name}: p90 over {target:g} ms")
        if not left.idle:
            self.wrong.append(f"{name}: leaked {leaked}")

    def conditions(self) -> str:
        """Return how often the engines were looked at, and how busy the machine was."""
        periods = sorted(1000 * each for each in self.periods)
        p50, p90 = statistics.median(periods), periods[int(0.9 * len(periods))]
        looked = f"looked at every {p50:.1f} ms, p90 {p90:.1f} ms"
        return f"{self.kind}: {looked}; nodes ran {self.ran_s:.1f} s and waited {self.waited_s:.1f} s for a core"


def cores(target: Cluster) -> tuple[float, float]:
    """Return how long the nodes' event loops have run so far, and how long they could have and had no core."""
    stats = [(Path("/proc") / str(each.pid) / "schedstat").read_text().split() for each in target.nodes.values()]
    return sum(int(ran_ns) for ran_ns, _, _ in stats) / 1e9, sum(int(waited_ns) for _, waited_ns, _ in stats) / 1e9


HEAD = f"{'engines':<11}{'stage':<24}{'tries':>6}{'met':>6}{'p50':>8}{'p90':>8}{'max':>8}{'leaked':>9}"


def tell(folder: Path, report: Report, stages: dict[str, Try], tries: int, *, narrow: bool) -> None:
    """Try some stages of one kind of cluster; a request that stays ends them."""
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
        for name, try_one in stages.items():
            try:
                found = [try_one(scene) for _ in range(tries)]
            except RequestNotReleased as error:
                report.wrong.append(f"{name}: {error}")
                break
            report.add(name, found, poll.look())
            print(report.rows[-1], file=sys.stderr, flush=True)
        report.ran_s += cores(target)[0] - ran_s
        report.waited_s += cores(target)[1] - waited_s
        report.wrong += target.wait_idle(5.0) + target.stop(20.0)


def measured(folder: Path, kind: str, part: str, tries: int) -> Report:
    """Return how all stages whose name has a part went with one kind of engines."""
    report = Report(kind)
    for narrow, every in ((True, NARROW), (False, WIDE)):
        if stages := {name: each for name, each in every.items() if part in name}:
            tell(folder / f"{kind[:3]}-{'narrow' if narrow else 'wide'}", report, stages, tries, narrow=narrow)
    return report


def main() -> int:
    """Print the table; return 1 if a p90 misses its target or something was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=(*TARGET_P90_MS, "both"), default="both")
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--stages", default="", help="those with this in their name")
    arguments = parser.parse_args()
    kinds = tuple(TARGET_P90_MS) if arguments.kind == "both" else (arguments.kind,)
    with place() as folder:
        reports = [measured(folder, kind, arguments.stages, arguments.tries) for kind in kinds]
    print("From the client's close to its request out of both engines of a pair, in ms; leaked: places / KV tokens.")
    print(HEAD)
    for report in reports:
        print(*report.rows, sep="\n")
    for report in reports:
        print(f"({report.conditions()})")
        for each in report.wrong:
            print(f"MISSED: {report.kind}: {each}")
    return 1 if any(report.wrong for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
