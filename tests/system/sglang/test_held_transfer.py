"""The hook that holds a KV cache's transfer open, on real engines."""

from __future__ import annotations

import time
from contextlib import closing
from ctypes.util import find_library

import pytest

from bench.pair_stages import plan
from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.cluster import cluster
from bench.rig.node import short_folder
from bench.rig.polling import LoadPoller

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_library("ibverbs") is None, reason="Mooncake's library wants Debian's libibverbs1"),
]

HELD_S = 60.0


def test_a_held_transfer_lasts_until_its_client_leaves_and_both_engines_are_free_at_once() -> None:
    with short_folder() as folder, cluster(folder, plan("sglang", narrow=False, transfer_s=HELD_S)) as target:
        with closing(LoadPoller(target, 0.01)) as poll:
            chat = Chat(target.front.port, chat_body("Tell me", 16))
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
        assert target.stop(20.0) == []
