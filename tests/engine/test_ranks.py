"""One engine over two nodes says what an engine on one says, and all of its ranks run or none."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from random import Random

import pytest

from bench._node import GONE_WITHIN_S, MODEL, ROOT, SGLANG, node, place, wait_until
from tests.launched import free_ports, launched, nodes

pytestmark = pytest.mark.engine

READY_WITHIN_S = 120.0
WITHIN_S = 60.0
NOTICED_WITHIN_S = 4.0  # on a busy machine
PROMPTS, AT_ONCE, TOKENS = 32, 8, 24
VOCABULARY = 512
EXACT = 'settings.dtype = "float32"\n'  # with fewer bits, adding up in another order changes some likeliest token

EXAMPLE = (ROOT / "examples" / "spanning.toml").read_text()


@pytest.fixture(scope="module")
def spanning():
    """The example of an engine over two nodes, at ports of its own."""
    text = EXAMPLE.replace('path = "tiny"', f'path = "{ROOT / "examples" / MODEL}"')
    ports = free_ports(4)
    for old, new in zip((8000, 7401, 7402, 7403), ports, strict=True):
        assert str(old) in text
        text = text.replace(str(old), str(new))
    with place() as folder, launched(folder, text + EXACT, ports[0]) as of:
        assert wait_until(lambda: "Ready: " in of.output(), READY_WITHIN_S) is not None, of.output()
        of.look()
        yield of


def completed(port, prompt):
    """Return the tokens that greedily follow a prompt, and why they ended."""
    connection = HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
    try:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
        assert answer.status == 200, said
        choice = said["choices"][0]
        return choice["token_ids"], choice["finish_reason"]
    finally:
        connection.close()


def all_completed(port):
    chance = Random(11)
    prompts = [[chance.randrange(3, VOCABULARY) for _ in range(chance.randint(5, 200))] for _ in range(PROMPTS)]
    with ThreadPoolExecutor(AT_ONCE) as clients:
        return list(clients.map(partial(completed, port), prompts))


def schedulers(of):
    """Return the processes that compute, by their rank."""
    found = [seen for seen in of.alive() if seen.command.startswith("sglang::scheduler_TP")]
    return {int(seen.command.removeprefix("sglang::scheduler_TP")): seen for seen in found}


def hosts(of):
    """Return the parents of the processes that compute, by their rank."""
    alive = {seen.pid: seen for seen in of.alive()}
    return {rank: alive[seen.parent] for rank, seen in schedulers(of).items() if seen.parent in alive}


def test_two_ranks_on_two_nodes_answer_with_the_tokens_of_one(spanning):
    assert sorted(schedulers(spanning)) == [0, 1]
    info = json.loads(spanning.get("/server_info")[1])
    assert [engine["ranks"] for engine in info["engines"].values()] == [2]
    with place() as folder, node(folder, engine=SGLANG + EXACT) as one:
        wanted, got = all_completed(one.port), all_completed(spanning.port)
    assert [index for index, pair in enumerate(zip(wanted, got, strict=True)) if pair[0] != pair[1]] == []
    assert max(len(tokens) for tokens, _ in got) == TOKENS


@pytest.mark.parametrize("what", ["scheduler 1", "host 1", "host 0", "node second", "node first"])
def test_whatever_ends_all_ranks_end_and_come_back_together(what, spanning):
    ready = spanning.output().count("first/tiny-0/engine is ready")
    assert completed(spanning.port, [5, 6, 7])[0]
    kind, _, which = what.partition(" ")
    every = {**schedulers(spanning), **{f"host {rank}": seen for rank, seen in hosts(spanning).items()}}
    assert len(every) == 4
    victim = {"scheduler": schedulers, "host": hosts, "node": nodes}[kind](spanning)
    os.kill(victim[int(which) if which.isdigit() else which].pid, signal.SIGKILL)
    gone = wait_until(lambda: not any(seen.lives for seen in every.values()), NOTICED_WITHIN_S)
    assert gone is not None, [name for name, seen in every.items() if seen.lives]
    again = wait_until(lambda: spanning.output().count("first/tiny-0/engine is ready") > ready, READY_WITHIN_S)
    assert again is not None, spanning.output()
    assert wait_until(lambda: spanning.get("/ready")[0] == 200, WITHIN_S) is not None, spanning.output()
    assert completed(spanning.port, [5, 6, 7])[0]
    assert sorted(schedulers(spanning)) == [0, 1]


def test_an_engine_over_two_nodes_leaves_nothing(spanning):
    spanning.signal(signal.SIGINT)
    assert spanning.wait_exit(WITHIN_S) is not None, spanning.output()
    assert spanning.wait_gone(GONE_WITHIN_S) is not None
    assert (spanning.process.returncode, spanning.left()) == (0, [])
