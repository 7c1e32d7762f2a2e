"""A pair of real engines whose prefill is asked first: its decode is asked with the state of the computed prompt."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from ctypes.util import find_library
from random import Random

import pytest

from bench.rig.node import MODEL, ROOT, Node, short_folder
from tests.rig.launched import at_free_ports, check_exit, running_launcher, wait_ready
from tests.system.sglang.conftest import RUNS_AHEAD
from tests.system.sglang.greedy import all_completed
from tests.system.sglang.test_pair import AT_ONCE, EXAMPLE, MEMORY, PROMPTS, READY_WITHIN_S

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,  # 50 s: in between, both orders are checked on simulated engines and on TensorRT-LLM's fake
    pytest.mark.skipif(find_library("ibverbs") is None, reason="Mooncake's library needs Debian's libibverbs1"),
]

LEFT = 50  # requests at each moment
MOMENTS_S = (0.0, 0.01, 0.05, 0.2)  # before the prompt, within it, at the hand-off, within the answer


@pytest.fixture
def pair() -> Iterator[Node]:
    text = EXAMPLE.replace(MEMORY, f"{MEMORY}{RUNS_AHEAD}")
    text = text.replace('path = "tiny"', f'path = "{ROOT / "examples" / MODEL}"\nhand_off = "sequential"')
    text, ports = at_free_ports(text, 8000, 7401, 7402, 8998)
    text += "[cluster]\nsilent_s = 10.0\nstalled_s = 60.0\n"  # what a busy machine does is no loss
    with short_folder() as folder, running_launcher(folder, text, ports[0]) as target:
        wait_ready(target, READY_WITHIN_S)
        target.observe()
        yield target


def left_after(port: int, prompt: list[int], after_s: float) -> None:
    """Ask for an answer, and leave after so long."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 200, "stream": True, "ignore_eos": True})
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        time.sleep(after_s)


def test_a_sequential_pair_answers_with_the_tokens_of_one_engine_and_what_is_left_holds_nothing(
    served: Node, pair: Node
) -> None:
    wanted = all_completed(served.port, PROMPTS, AT_ONCE)  # as by a concurrent pair: its test has the same prompts
    assert all_completed(pair.port, PROMPTS, AT_ONCE) == wanted
    chance = Random(7)
    for moment_s in MOMENTS_S:
        for _ in range(LEFT):
            left_after(pair.port, chance.choice(PROMPTS), chance.uniform(0, moment_s))
    # Each leg has fewer slots than requests were left: the same prompts would wait for ever.
    assert all_completed(pair.port, PROMPTS, AT_ONCE) == wanted
    loud = [line for line in pair.output().splitlines() if '"level": "warning"' in line]
    assert not [line for line in loud if "a turn took too long" not in line]  # which depends on the machine
    pair.signal(signal.SIGINT)
    check_exit(pair)
