"""A prefill and a decode on nodes of their own answer with the tokens of one engine of both legs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from ctypes.util import find_library
from typing import Any

import httpx2
import pytest

from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.node import MODEL, ROOT, Node, short_folder, wait_until
from tests.rig.launched import at_free_ports, check_exit, nodes, running_launcher, wait_ready
from tests.system.sglang.conftest import RUNS_AHEAD
from tests.system.sglang.greedy import all_completed, completed, prompts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_library("ibverbs") is None, reason="Mooncake's library needs Debian's libibverbs1"),
]

READY_WITHIN_S = 240.0
WITHIN_S = 90.0
SOON_S = 20.0  # and a node that nobody ends would drain for half a minute
AT_ONCE = 16
ROUNDED = 0.3  # of logarithms that may be -20
PROMPTS = prompts(64, longest=300, seed=5)

MEMORY, LITTLE_MEMORY = "kv_tokens_max = 16384\n", "kv_tokens_max = 2048\npage_size = 64\n"
EXAMPLE = (ROOT / "examples" / "disagg.toml").read_text()


@pytest.fixture(params=[pytest.param("", marks=pytest.mark.nightly), RUNS_AHEAD], ids=["in step", "ahead"])
def pair(request: pytest.FixtureRequest) -> Iterator[Node]:
    """The example of a pair, at ports of its own, with schedulers as on a CPU and as on a GPU."""
    text = EXAMPLE.replace(MEMORY, request.param if request.param == LITTLE_MEMORY else f"{MEMORY}{request.param}")
    text = text.replace('path = "tiny"', f'path = "{ROOT / "examples" / MODEL}"')
    text, ports = at_free_ports(text, 8000, 7401, 7402, 8998)
    text += "[cluster]\nsilent_s = 10.0\nstalled_s = 60.0\n"  # what a busy machine does is no loss
    with short_folder() as folder, running_launcher(folder, text, ports[0]) as target:
        wait_ready(target, READY_WITHIN_S)
        target.observe()
        yield target


def test_a_pair_answers_with_the_tokens_of_one_engine_16_at_a_time_and_leaves_nothing(served: Node, pair: Node) -> None:
    wanted, got = (all_completed(port, PROMPTS, AT_ONCE) for port in (served.port, pair.port))
    different = [index for index, pairs in enumerate(zip(wanted, got, strict=True)) if pairs[0] != pairs[1]]
    assert different == []
    assert {len(tokens) for tokens, _, _ in got} != {0}
    assert [count for _, _, count in got] == [len(prompt) for prompt in PROMPTS]
    penalties = {"frequency_penalty": 0.8, "presence_penalty": -0.5, "repetition_penalty": 1.2}
    whole, handed = (
        [completed(port, each, **penalties)[0] for each in PROMPTS[:8]] for port in (served.port, pair.port)
    )
    assert handed == whole != [tokens for tokens, _, _ in wanted[:8]]
    assert list(nodes(pair)) == ["decode", "front", "prefill"]
    for prompt in PROMPTS[:4]:
        check_alike(scored(served.port, prompt), scored(pair.port, prompt), len(prompt))
    # No answer needed a second try: a resume, a restart or a lost link would be logged.
    loud = [line for line in pair.output().splitlines() if '"level": "warning"' in line]
    assert not [line for line in loud if "a turn took too long" not in line]  # which depends on the machine
    pair.signal(signal.SIGINT)
    check_exit(pair)


def scored(port: int, prompt: list[int]) -> dict[str, list[Any]]:
    """Return the table of the log probabilities of a prompt and a token behind it."""
    wanted = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    answer = httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=wanted, timeout=WITHIN_S).json()
    table: dict[str, list[Any]] = answer["choices"][0]["logprobs"]
    return table


def check_alike(one: dict[str, list[Any]], other: dict[str, list[Any]], prompt: int) -> None:
    """Check that two engines found the same log probabilities, but for the rounding of bfloat16."""
    assert one["tokens"] == other["tokens"]
    assert {len(column) for column in (*one.values(), *other.values())} == {prompt + 1}
    assert one["token_logprobs"][0] is other["token_logprobs"][0] is None
    pairs = zip(one["token_logprobs"][1:], other["token_logprobs"][1:], strict=True)
    assert all(abs(value - another) < ROUNDED for value, another in pairs)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", [LITTLE_MEMORY], indirect=True)
def test_what_a_pair_accepts_it_answers_whole_however_full_its_memory_becomes(pair: Node) -> None:
    total = 2048 - 2 * 64 - 512  # SGLang keeps one page, another may be begun, and a decode has a reserve
    for size in (1, 2, 63, 64, 65, 128, total // 2, total - 64):
        ids, reason, prompt_tokens = completed(pair.port, [7] * (total - size), max_tokens=size, ignore_eos=True)
        assert (len(ids), reason, prompt_tokens) == (size, "length", total - size)
    with pytest.raises(AssertionError, match=f"together they can have {total}"):
        completed(pair.port, [7] * (total - 1), max_tokens=2)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", [""], indirect=True)
def test_kill_9_of_the_launcher_leaves_no_engine(pair: Node) -> None:
    chat = Chat(pair.port, chat_body("Tell me a long story", 400))
    answer = BackgroundReader(chat.read)
    assert wait_until(lambda: chat.outcome.first_at, WITHIN_S) is not None, pair.output()
    assert len(pair.living()) >= 10  # the launcher, three nodes, and of each engine a zygote, a host and a scheduler
    pair.signal(signal.SIGKILL)
    assert pair.wait_gone(SOON_S) is not None, pair.leftovers()
    assert not answer.wait(WITHIN_S).whole
