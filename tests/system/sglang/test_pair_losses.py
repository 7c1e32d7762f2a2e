"""When one leg of a pair of real engines is lost, the other releases the request while its transfer is still held.

A hook holds each KV cache's transfer open for a minute, until the client leaves. How soon the other leg is free is
measured by `make pair-abort-times`; here it must be long before the minute is over, on however busy a
machine. The pair is started once for all tests, and made whole again after each.

SGLang decides one thing: a decode keeps the KV memory into which a prefill may still write until the prefill reports
that it does not, 30 s at most. Here it is 3 s.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from dataclasses import replace

import pytest

from bench.faults.pair_aborts import DECODE, PREFILL, plan
from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.cluster import Cluster, cluster
from bench.rig.node import short_folder, wait_until
from tests.system.sglang.conftest import RUNS_AHEAD

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_library("ibverbs") is None, reason="Mooncake's library needs Debian's libibverbs1"),
]

HELD_S = 60.0  # the transfer: SGLang's decode waits all that time, and would for longer
SILENT_S, STALLED_S = 5.0, 120.0  # of a stopped node, whose requests would else be held until it counts as lost
FREE_WITHIN_S = 40.0
WITHIN_S = 90.0  # for what else would never be
KEPT_S = 3
HOLD = f'TRANSFER_DELAY_S = "{HELD_S}"\n'
KEEP = f'SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT = "{KEPT_S}"\n'
OTHER = {PREFILL: DECODE, DECODE: PREFILL}


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    planned = plan("sglang", narrow=False, transfer_s=HELD_S)
    ahead = RUNS_AHEAD.removeprefix("settings.")  # each ends in that table
    engines = {leg: text.replace(HOLD, HOLD + KEEP) + ahead for leg, text in planned.engines.items()}
    silence = f"silent_s = {SILENT_S}\nstalled_s = {STALLED_S}\n"
    with short_folder() as folder, cluster(folder, replace(planned, engines=engines, cluster=silence)) as target:
        yield target
        assert target.stop(WITHIN_S) == []


@pytest.fixture
def pair(started: Cluster) -> Iterator[Cluster]:
    """The pair, idle; a test that fails may leave a node that is stopped, or that has ended."""
    started.wait_ready()
    assert started.wait_idle(WITHIN_S) == []
    yield started
    for name, node in list(started.nodes.items()):
        if node.process.poll() is None:
            node.signal(signal.SIGCONT)
        else:
            node.wait_gone(WITHIN_S)
            started.start(name)


@contextmanager
def in_transfer(pair: Cluster) -> Iterator[tuple[Chat, BackgroundReader]]:
    """Send a request; yield its client once the prefill has computed and the decode waits for the transfer.

    The client leaves when the body ends, however it does.
    """
    chat = Chat(pair.front.port, chat_body("Tell me", 16))
    answer = BackgroundReader(chat.read)

    def reached() -> bool:
        prefill, decode = pair.counts(PREFILL), pair.counts(DECODE)
        return bool(prefill and decode and prefill["kv_tokens_used"] > 0 and decode["waiting"] == 1)

    try:
        assert wait_until(reached, HELD_S / 2) is not None
        yield chat, answer
    finally:
        chat.leave()


def check_freed(pair: Cluster, leg: str, within_s: float = FREE_WITHIN_S) -> None:
    """Check that the engine of a leg has no request soon, and a prefill no KV memory in use either."""
    target = ("running", "waiting") if leg == DECODE else ("running", "waiting", "kv_tokens_used")
    free = wait_until(
        lambda: (now := pair.counts(leg)) and not any(now[each] for each in target), within_s, every_s=0.01
    )
    assert free is not None, f"the {leg} still holds {pair.counts(leg)}"


@pytest.mark.nightly
def test_a_held_transfer_lasts_until_its_client_leaves_and_then_both_engines_are_free(pair: Cluster) -> None:
    with in_transfer(pair) as (chat, answer):
        time.sleep(1.0)
        prefill, decode = pair.counts(PREFILL), pair.counts(DECODE)
        assert prefill is not None
        assert decode is not None
        assert prefill["kv_tokens_used"] > 0
        assert decode["waiting"] == 1
        assert chat.outcome.first_at is None
        chat.leave()
        check_freed(pair, PREFILL)
        check_freed(pair, DECODE)
        answer.wait(WITHIN_S)


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [PREFILL, DECODE])
@pytest.mark.parametrize("what", ["host", "scheduler"])
def test_when_an_engine_is_killed_the_other_is_free_and_the_client_gets_engine_lost(
    lost: str, what: str, pair: Cluster
) -> None:
    with in_transfer(pair) as (_, answer):
        pair.nodes[lost].kill(what)
        check_freed(pair, OTHER[lost])
        outcome = answer.wait(WITHIN_S)
    assert outcome.error is not None
    assert (outcome.text, outcome.finish, outcome.error["code"]) == ("", None, "engine_lost")


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_when_a_node_is_killed_the_other_leg_is_free_and_nothing_is_left_when_it_is_back(
    lost: str, pair: Cluster
) -> None:
    with in_transfer(pair):
        pair.nodes[lost].signal(signal.SIGKILL)
        check_freed(pair, OTHER[lost])
        assert pair.nodes[lost].wait_gone(WITHIN_S) is not None
        pair.start(lost)
    pair.wait_ready()
    assert pair.wait_idle(WITHIN_S) == []


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_when_a_node_is_stopped_the_other_leg_is_free_once_its_silence_is_known(lost: str, pair: Cluster) -> None:
    with in_transfer(pair) as (chat, _):
        pair.nodes[lost].signal(signal.SIGSTOP)
        try:
            check_freed(pair, OTHER[lost], SILENT_S + FREE_WITHIN_S)
            chat.leave()
        finally:
            pair.nodes[lost].signal(signal.SIGCONT)
    pair.wait_ready()
    assert pair.wait_idle(WITHIN_S) == []
