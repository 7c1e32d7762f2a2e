"""The stages of a request in a pair of engines: a client reaches each one and disconnects there.

A request that waits at the gateway or for a worker is in no engine: its time is by the front's own counts, and both
engines must have continued with their requests. For a lane only the engine's slot is counted, as its neighbours hold
KV memory. Each transfer takes `TRANSFER_S`, since between engines of one machine a KV cache has moved before a client
could disconnect. A real engine publishes its counts at each step here, by default at every fifteenth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.faults.aborts import TOKENS, Limits, Scene, Stage, first_token, leave, try_stages
from bench.faults.polling import REACHED_S, Held, Poller
from bench.faults.scenario import Run
from bench.rig.clients import Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.cluster import FRONT, Plan, cluster, cluster_engine_name, node_engine_name, sglang, simulated
from bench.rig.node import ROOT, wait_until
from bench.rig.prompts import STORY_PROMPT

PREFILL, DECODE = "prefill", "decode"
LEGS = (PREFILL, DECODE)
TARGET_P90_MS = {"simulated": 20.0, "sglang": 100.0}
PAUSE_S = {"simulated": 0.001, "sglang": 0.004}  # between two scrapes; a real engine computes on the same cores
LONG = 1500  # tokens of a prompt whose prefill takes long enough to disconnect in it
CHUNK = 256  # prompt tokens of a step
SHORT = 8
PIECES = 10
LANES = ("a", "b", "c")
TRANSFER_S = 0.15
PLUGIN = str(ROOT / "bench" / "rig" / "plugin")
COSTS = {"fixed_s": 0.01, "per_prefill_token_s": 0.00005}
HELD = """\
prefill_chunk = {chunk}
[engine.{name}.environment]
TRANSFER_DELAY_S = "{held_s}"
[engine.{name}.settings]
load_snapshot_publish_interval = 1
"""


def plan(kind: str, *, narrow: bool, transfer_s: float = TRANSFER_S) -> Plan:
    """Return the plan of a pair with 16 slots, or with one slot behind a gateway that admits two requests."""
    slots = 1 if narrow else 16
    if kind == "simulated":
        costs = COSTS | {"transfer_s": transfer_s}
        engines = {leg: simulated(leg, leg, slots=slots, costs=costs, prefill_chunk=CHUNK) for leg in LEGS}
    else:
        held = {leg: HELD.format(name=node_engine_name(leg), chunk=CHUNK, held_s=transfer_s) for leg in LEGS}
        engines = {leg: sglang(leg, slots=slots) + held[leg] for leg in LEGS}
    gateway = "requests_max = 2\nadmit_s = 60.0\n" if narrow else ""
    return Plan(engines, gateway=gateway, environment={"PYTHONPATH": PLUGIN})


@dataclass
class PairScene(Scene):
    """The scene of a pair: one worker is scraped, which asks both engines anew, and the front where it is needed."""

    long: int = 0  # the real number of tokens of a long prompt

    def asked(self, tokens: int, **options: object) -> dict[str, Any]:
        """Return a request whose prompt no cache has."""
        return chat_body(self.prompt(tokens), TOKENS, **options)

    def computed(self, now: Held) -> bool:
        """Whether the prefill has computed a long prompt; it holds none of it after the hand-off."""
        kv_tokens = count(now, PREFILL, "kv_tokens_used")
        return count(now, PREFILL, "running") == 0 and (kv_tokens == 0 or kv_tokens >= self.long)


def count(now: Held, leg: str, *gauges: str) -> float:
    """Return the sum of gauges of an engine, or of all of them."""
    name = f'{{engine="{cluster_engine_name(leg)}"}}'
    return sum(
        now.total(PREFILL, f"engine_{gauge}{name}") for gauge in gauges or ("running", "waiting", "kv_tokens_used")
    )


def front(now: Held, state: str) -> float:
    """Return the requests of the front in a state."""
    return now.total(FRONT, f"requests_{state}", default=-1.0)


# The stages ------------------------------------------------------------------------------


def prefill_running(scene: PairScene) -> tuple[float, bool]:
    """Disconnect while the prefill computes the prompt, after some chunks of it."""
    computed = CHUNK * scene.chance.randrange(4)
    with scene.request(scene.asked(LONG)) as chat:
        took_s, reached = scene.left_when(
            chat, lambda now: count(now, PREFILL) > 0 and count(now, PREFILL, "kv_tokens_used") >= computed
        )
    return took_s, reached and chat.outcome.first_at is None


def in_transfer(scene: PairScene) -> tuple[float, bool]:
    """Disconnect when the prefill has computed the prompt, and the decode has not begun to answer."""
    with scene.request(scene.asked(LONG)) as chat:
        took_s, reached = scene.left_when(
            chat,
            lambda now: count(now, PREFILL) > 0,
            lambda now: scene.computed(now) and count(now, DECODE) > 0,
            within_s=TRANSFER_S / 2,
        )
    return took_s, reached and chat.outcome.first_at is None


def waits_for_kv(scene: PairScene) -> tuple[float, bool]:
    """Disconnect three clients while the prefill computes for the first two and the decode waits for the third."""
    with ExitStack() as stack:
        chats = [stack.enter_context(scene.request(scene.asked(LONG))) for _ in range(3)]
        reached = scene.poll.wait(lambda now: count(now, DECODE, "running", "waiting") >= len(chats))
        reached = reached and chats[-1].outcome.first_at is None
        return scene.poll.until_idle(leave(*reversed(chats))), reached


def streaming(scene: PairScene, n: int = 1) -> tuple[float, bool]:
    """Disconnect in the middle of a stream, of one choice or of several at once."""
    with scene.request(scene.asked(SHORT, n=n)) as chat:
        reached = wait_until(lambda: chat.outcome.pieces >= PIECES, REACHED_S) is not None
        reached = reached and scene.poll.wait(lambda now: count(now, DECODE, "running") == n)
        return scene.poll.until_idle(leave(chat)), reached


def not_streaming(scene: PairScene) -> tuple[float, bool]:
    """Disconnect in the middle of an answer that comes in one piece."""
    with scene.request(scene.asked(SHORT, stream=False)) as chat:
        reached = scene.poll.wait(lambda now: count(now, DECODE, "running") > 0)
        time.sleep(TRANSFER_S + scene.chance.uniform(0.05, 0.2))  # a simulated decode runs before the transfer ends
        return scene.poll.until_idle(leave(chat)), reached


def one_lane(scene: PairScene) -> tuple[float, bool]:
    """Cancel one of three responses of a WebSocket while all of them are being answered."""
    with closing(ResponsesSocket(scene.port)) as socket:
        for lane in LANES:
            socket.send(response_body(scene.prompt(SHORT), TOKENS) | {"stream_id": lane})
        begun: set[str] = set()
        for event in socket.events(Outcome()):
            if event["type"] == "response.output_text.delta":
                begun.add(event["stream_id"])
            if len(begun) == len(LANES):
                break
        reached = scene.poll.wait(lambda now: count(now, DECODE, "running") == len(LANES))
        cancelled_at = time.perf_counter()
        socket.send({"type": "response.cancel", "stream_id": scene.chance.choice(LANES)})
        others = len(LANES) - 1

        def free(now: Held) -> bool:
            return count(now, DECODE, "running") == others and count(now, PREFILL, "running", "waiting") == 0

        took_s = scene.poll.until(free, cancelled_at, lambda now: front(now, "running") == others)
        socket.leave()
    scene.poll.until_idle(time.perf_counter())
    return took_s, reached


@contextmanager
def full(scene: PairScene) -> Iterator[None]:
    """Hold the only slot while the body runs."""
    with scene.request(scene.asked(SHORT)) as chat:
        assert wait_until(lambda: chat.outcome.pieces > 0, REACHED_S) is not None, "the only slot was not taken"
        yield
        assert chat.outcome.ended_at == 0.0, "the only slot was released too early"
    scene.poll.until_idle(time.perf_counter())


def _only_first(now: Held) -> bool:
    others = count(now, DECODE, "waiting") + count(now, PREFILL, "running", "waiting")
    return count(now, DECODE, "running") == 1 and others == 0


def _outside(scene: PairScene, chat: Chat, state: str, number: int, after: int) -> tuple[float, bool]:
    """Disconnect once so many requests of the front are in a state; measure until so many are, by its own counts."""
    poll = replace(scene.poll, names=(PREFILL, FRONT))
    reached = poll.wait(lambda now: front(now, state) == number and _only_first(now))
    return poll.until(lambda now: front(now, state) == after, leave(chat), _only_first), reached


def waits_for_worker(scene: PairScene) -> tuple[float, bool]:
    """Disconnect while the router waits for a slot of the pair."""
    with full(scene), scene.request(scene.asked(SHORT)) as chat:
        return _outside(scene, chat, "running", 2, 1)


def waits_for_admission(scene: PairScene) -> tuple[float, bool]:
    """Disconnect while the request waits for admission to the full gateway."""
    with full(scene), scene.request(scene.asked(SHORT)), scene.request(scene.asked(SHORT)) as chat:
        return _outside(scene, chat, "waiting", 1, 0)


NARROW: dict[str, Stage] = {"queued at the gateway": waits_for_admission, "waiting for a worker": waits_for_worker}
WIDE: dict[str, Stage] = {
    "prefill running": prefill_running,
    "KV in transfer": in_transfer,
    "decode waiting for KV": waits_for_kv,
    "streaming": streaming,
    "one lane of several": one_lane,
    "non-streaming": not_streaming,
    "n = 3": partial(streaming, n=3),
}


def measure(run: Run, kind: str, *, narrow: bool) -> None:
    """Try the chosen stages of one cluster, until a request is not released."""
    stages = NARROW if narrow else WIDE
    if not run.chosen(stages):
        return
    with cluster(run.folder, plan(kind, narrow=narrow)) as target:
        needs = [f'{PREFILL} engine_running{{engine="{cluster_engine_name(leg)}"}}' for leg in LEGS]
        poller = Poller(target.nodes, (PREFILL,), PAUSE_S[kind], last=FRONT, engines_only=True, needs=needs)
        with closing(poller) as poll:
            scene = PairScene(target.front.port, poll)
            for _ in range(2):
                Chat(scene.port, chat_body(STORY_PROMPT, 16)).read()  # a first request is slower than any other
            if not narrow:
                scene.long = first_token(scene.port, LONG)[1]
            poll.until_idle(time.perf_counter())

            def left() -> list[str]:
                return [each for each in poll.read().sentences() if "engine_" in each]

            try_stages(run, scene, stages, Limits(TARGET_P90_MS[kind]), left, f"{kind}: ")
        run.wrong += target.wait_idle(5.0) + target.stop(20.0)


def pair_abort_times(run: Run) -> None:
    """Measure every stage with the chosen kinds of engines."""
    for kind in TARGET_P90_MS:
        if run.options.kind in {kind, "both"}:
            for narrow in (True, False):
                run.attempt(f"{kind} {'narrow' if narrow else 'wide'}", partial(measure, kind=kind, narrow=narrow))
