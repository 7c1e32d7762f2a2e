"""The stages of a request in a pair of engines: a client reaches each one and disconnects there.

Between engines of one machine a KV cache has moved before a client could disconnect. So each transfer takes
`TRANSFER_S`: by the costs of the simulated engine, and by `TRANSFER_DELAY_S` of the real one
(`bench/rig/plugin/espalier_transfer_delay.py`). A real engine publishes its counts at each step here, by default at
every fifteenth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from itertools import count
from random import Random

from bench.rig.clients import BackgroundReader, Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.cluster import Cluster, Plan, node_engine_name, sglang, simulated
from bench.rig.node import ROOT, wait_until
from bench.rig.polling import DECODE, GIVE_UP_S, PREFILL, REACHED_S, LoadPoller, PairLoad
from bench.rig.prompts import uncached_prompt

TOKENS = 1000  # more than an answer gets before its client disconnects
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
    legs = (PREFILL, DECODE)
    if kind == "simulated":
        costs = COSTS | {"transfer_s": transfer_s}
        engines = {leg: simulated(leg, leg, slots=slots, costs=costs, prefill_chunk=CHUNK) for leg in legs}
    else:
        held = {leg: HELD.format(name=node_engine_name(leg), chunk=CHUNK, held_s=transfer_s) for leg in legs}
        engines = {leg: sglang(leg, slots=slots) + held[leg] for leg in legs}
    return Plan(
        engines, gateway="requests_max = 2\nadmit_s = 60.0\n" if narrow else "", environment={"PYTHONPATH": PLUGIN}
    )


@dataclass
class Scene:
    """The cluster and what a stage needs to disturb it."""

    target: Cluster
    poll: LoadPoller
    chance: Random
    long: int = 0  # the real number of tokens of a long prompt
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self.target.front.port

    def prompt(self, tokens: int) -> str:
        """Return a prompt of about so many tokens that is in no prefix cache."""
        return uncached_prompt(tokens, next(self.numbers))

    def computed(self, now: PairLoad) -> bool:
        """Whether the prefill has computed a long prompt; it holds none of it after the hand-off."""
        kv_tokens = now.prefill["kv_tokens_used"]
        return now.prefill["running"] == 0 and (kv_tokens == 0 or kv_tokens >= self.long)


@contextmanager
def request(scene: Scene, tokens: int, **options: object) -> Iterator[Chat]:
    """Send a request and read its answer in another thread; disconnect when the body ends."""
    chat = Chat(scene.port, chat_body(scene.prompt(tokens), TOKENS, **options))
    reader = BackgroundReader(chat.read if options.get("stream", True) else partial(_read_whole, chat))
    try:
        yield chat
    finally:
        chat.leave()
        reader.wait(GIVE_UP_S)
        chat.close()


def _read_whole(chat: Chat) -> Outcome:
    with suppress(OSError, HTTPException):
        chat.connection.getresponse()  # there is none: the client disconnects before
    return chat.outcome


def _disconnect(*chats: Chat) -> float:
    left_at = time.perf_counter()
    for chat in chats:
        chat.leave()
    return left_at


def prefill_running(scene: Scene) -> tuple[float, bool]:
    """Disconnect while the prefill computes the prompt, after some chunks of it."""
    computed = CHUNK * scene.chance.randrange(4)
    with request(scene, LONG) as chat:
        reached = scene.poll.wait(lambda now: any(now.prefill.values()) and now.prefill["kv_tokens_used"] >= computed)
        reached = reached and chat.outcome.first_at is None
        return scene.poll.until_idle(_disconnect(chat)), reached


def in_transfer(scene: Scene) -> tuple[float, bool]:
    """Disconnect when the prefill has computed the prompt, and the decode has not begun to answer."""
    with request(scene, LONG) as chat:

        def handed_over(now: PairLoad) -> bool:
            return scene.computed(now) and any(now.decode.values())

        reached = scene.poll.wait(lambda now: any(now.prefill.values())) and scene.poll.wait(handed_over)
        time.sleep(scene.chance.uniform(0.0, 0.5) * TRANSFER_S)
        reached = reached and chat.outcome.first_at is None
        return scene.poll.until_idle(_disconnect(chat)), reached


def waits_for_kv(scene: Scene) -> tuple[float, bool]:
    """Disconnect three clients while the prefill computes for the first two and the decode waits for the third."""
    with ExitStack() as stack:
        chats = [stack.enter_context(request(scene, LONG)) for _ in range(3)]
        reached = scene.poll.wait(lambda now: now.decode["running"] + now.decode["waiting"] >= len(chats))
        reached = reached and chats[-1].outcome.first_at is None
        return scene.poll.until_idle(_disconnect(*reversed(chats))), reached


def streaming(scene: Scene, n: int = 1) -> tuple[float, bool]:
    """Disconnect in the middle of a stream, of one choice or of several at once."""
    with request(scene, SHORT, n=n) as chat:
        reached = wait_until(lambda: chat.outcome.pieces >= PIECES, REACHED_S) is not None
        reached = reached and scene.poll.wait(lambda now: now.decode["running"] == n)
        return scene.poll.until_idle(_disconnect(chat)), reached


def not_streaming(scene: Scene) -> tuple[float, bool]:
    """Disconnect in the middle of an answer that comes in one piece."""
    with request(scene, SHORT, stream=False) as chat:
        reached = scene.poll.wait(lambda now: now.decode["running"] > 0)
        time.sleep(TRANSFER_S + scene.chance.uniform(0.05, 0.2))  # a simulated decode runs before the transfer ends
        return scene.poll.until_idle(_disconnect(chat)), reached


def one_lane(scene: Scene) -> tuple[float, bool]:
    """Cancel one of three responses of a WebSocket while all of them are being answered."""
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
        reached = scene.poll.wait(lambda now: now.decode["running"] == len(LANES))
        cancelled_at = time.perf_counter()
        socket.send({"type": "response.cancel", "stream_id": scene.chance.choice(LANES)})
        others = len(LANES) - 1

        def free(now: PairLoad) -> bool:
            return now.decode["running"] == others and now.prefill["running"] + now.prefill["waiting"] == 0

        took_s = scene.poll.until(free, lambda now: now.running == others, cancelled_at)
        socket.leave()
    scene.poll.until_idle(time.perf_counter())
    return took_s, reached


@contextmanager
def full(scene: Scene) -> Iterator[None]:
    """Hold the only slot while the body runs."""
    with request(scene, SHORT) as chat:
        assert wait_until(lambda: chat.outcome.pieces > 0, REACHED_S) is not None, "the only slot was not taken"
        yield
        assert chat.outcome.ended_at == 0.0, "the only slot was released too early"
    scene.poll.until_idle(time.perf_counter())


def _only_first(now: PairLoad) -> bool:
    return now.decode["running"] == 1 and now.decode["waiting"] == now.prefill["running"] == now.prefill["waiting"] == 0


def waits_for_worker(scene: Scene) -> tuple[float, bool]:
    """Disconnect while the router waits for a slot of the pair."""
    with full(scene), request(scene, SHORT) as chat:
        reached = scene.poll.wait(lambda now: now.running == 2 and _only_first(now), front=True)
        left_at = _disconnect(chat)
        return scene.poll.until(lambda now: now.running == 1, _only_first, left_at, front=True), reached


def waits_for_admission(scene: Scene) -> tuple[float, bool]:
    """Disconnect while the request waits for admission to the full gateway."""
    with full(scene), request(scene, SHORT), request(scene, SHORT) as chat:
        reached = scene.poll.wait(lambda now: now.waiting == 1 and _only_first(now), front=True)
        left_at = _disconnect(chat)
        return scene.poll.until(lambda now: now.waiting == 0, _only_first, left_at, front=True), reached


Stage = Callable[[Scene], tuple[float, bool]]
"""Returns the seconds until the request was released, and whether the client disconnected in this stage."""

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
