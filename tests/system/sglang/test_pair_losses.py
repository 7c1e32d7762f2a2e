"""When one leg of a pair of real engines ends, the other is released within a second, and the pair continues.

A hook holds each KV cache's transfer open, until the client leaves. The pair is started once for all tests.

SGLang decides one thing: a decode keeps the KV memory into which a prefill may still write until the prefill reports
that it does not, 30 s at most. Here it is 3 s.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from ctypes.util import find_library
from dataclasses import replace

import pytest

from bench.pair_stages import plan
from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.cluster import Cluster, cluster
from bench.rig.node import short_folder, wait_until
from bench.rig.polling import DECODE, PREFILL, LoadPoller
from supervisor.config.schema import ClusterSection

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_library("ibverbs") is None, reason="Mooncake's library needs Debian's libibverbs1"),
]

HELD_S = 60.0  # the transfer: SGLang's decode waits all that time, and would for longer
FREE_WITHIN_S = 1.0
REACHED_S, ENDED_S = 10.0, 20.0
KEPT_S = 3
HOLD = f'ESPALIER_TRANSFER_DELAY_S = "{HELD_S}"\n'
KEEP = f'SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT = "{KEPT_S}"\n'
OTHER = {PREFILL: DECODE, DECODE: PREFILL}


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    planned = plan("sglang", narrow=False, transfer_s=HELD_S)
    engines = {leg: text.replace(HOLD, HOLD + KEEP) for leg, text in planned.engines.items()}
    with short_folder() as folder, cluster(folder, replace(planned, engines=engines)) as target:
        yield target
        assert target.stop(ENDED_S) == []


def in_transfer(pair: Cluster) -> tuple[Chat, BackgroundReader]:
    """Send a request; return its client once the prefill has computed and the decode waits for the transfer."""
    pair.wait_ready()
    assert pair.wait_idle(ENDED_S) == []
    chat = Chat(pair.front.port, chat_body("Tell me", 16))
    answer = BackgroundReader(chat.read)

    def reached() -> bool:
        prefill, decode = pair.counts(PREFILL), pair.counts(DECODE)
        assert prefill is not None
        assert decode is not None
        return prefill["kv_tokens_used"] > 0 and decode["waiting"] == 1

    assert wait_until(reached, REACHED_S) is not None
    return chat, answer


def test_a_held_transfer_lasts_until_its_client_leaves_and_both_engines_are_free_at_once(pair: Cluster) -> None:
    with closing(LoadPoller(pair, 0.01)) as poll:
        chat = Chat(pair.front.port, chat_body("Tell me", 16))
        answer = BackgroundReader(chat.read)
        assert poll.wait(lambda now: now.prefill["kv_tokens_used"] > 0 and now.decode["waiting"] == 1)
        time.sleep(1.0)
        held = poll.read()
        assert held.prefill["kv_tokens_used"] > 0
        assert held.decode["waiting"] == 1
        assert chat.outcome.first_at is None
        left_at = time.perf_counter()
        chat.leave()
        assert poll.until_idle(left_at) < 2.0
        answer.wait(5.0)


def free_after_s(pair: Cluster, leg: str, since: float) -> float:
    """Return how long after `since` the engine of a leg had no request, and a prefill no KV memory in use either."""
    target = ("running", "waiting") if leg == DECODE else ("running", "waiting", "kv_tokens_used")
    free = wait_until(
        lambda: (now := pair.counts(leg)) and not any(now[each] for each in target), ENDED_S, every_s=0.01
    )
    assert free is not None, f"the {leg} still holds {pair.counts(leg)}"
    return time.perf_counter() - since


@pytest.mark.parametrize("what", ["scheduler", "host"])
@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_when_an_engine_is_killed_the_other_is_free_and_the_client_gets_engine_lost(
    lost: str, what: str, pair: Cluster
) -> None:
    _, answer = in_transfer(pair)
    lost_at = time.perf_counter()
    pair.nodes[lost].kill(what)
    assert free_after_s(pair, OTHER[lost], lost_at) < FREE_WITHIN_S
    outcome = answer.wait(ENDED_S)
    assert outcome.error is not None
    assert (outcome.text, outcome.finish, outcome.error["code"]) == ("", None, "engine_lost")


@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_when_a_node_is_killed_the_other_leg_is_free_and_nothing_is_left_when_it_is_back(
    lost: str, pair: Cluster
) -> None:
    chat, _ = in_transfer(pair)
    lost_at = time.perf_counter()
    pair.nodes[lost].signal(signal.SIGKILL)
    assert free_after_s(pair, OTHER[lost], lost_at) < FREE_WITHIN_S
    pair.nodes[lost].wait_gone()
    pair.start(lost)
    chat.leave()
    pair.wait_ready()
    assert pair.wait_idle(ENDED_S) == []


@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_when_a_node_is_stopped_the_other_leg_is_free_once_its_silence_is_known(lost: str, pair: Cluster) -> None:
    chat, _ = in_transfer(pair)
    stopped_at = time.perf_counter()
    pair.nodes[lost].signal(signal.SIGSTOP)
    try:
        known_at = stopped_at + ClusterSection().silent_s
        assert free_after_s(pair, OTHER[lost], known_at) < FREE_WITHIN_S
        chat.leave()
    finally:
        pair.nodes[lost].signal(signal.SIGCONT)
    pair.wait_ready()
    assert pair.wait_idle(ENDED_S) == []
