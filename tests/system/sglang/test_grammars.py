"""Explosive grammars beside an honest stream, on the real engine: none holds it, and every ordinary one is accepted."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any, TypeAlias

import pytest

from bench.rig.node import MODEL, Node
from bench.rig.prompts import OAK_PROMPT
from tests.rig.gateway import ids
from tests.rig.grammar_samples import ATTACKS, BENIGN, Sample
from tests.system.sglang.test_options import MESSAGES, post

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
log = logging.getLogger(__name__)

Json: TypeAlias = dict[str, Any]

AT_A_TIME = 4
# Beyond the engine's own: what `make attacks` asks of a machine that does nothing else, and how long nothing may take anywhere.
GAP_S = 0.25 if "ESPALIER_ALONE" in os.environ else 5.0


def body(sample: Sample, **more: Any) -> Json:
    asked: Json = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0} | more
    if sample.kind == "json_schema":
        named = {"name": "x", "schema": json.loads(sample.text)}
        return asked | {"response_format": {"type": "json_schema", "json_schema": named}}
    if sample.kind == "structural_tag":
        return asked | {"structural_tag": json.loads(sample.text)}
    return asked | {sample.kind: sample.text}


class Honest:
    """Streams one answer after the other, and notes the gaps between tokens and what was not whole."""

    def __init__(self, port: int) -> None:
        self.port, self.whole = port, 0
        self.gaps: list[float] = []
        self.lost: list[str] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def worst(self) -> float:
        return max(self.gaps, default=0.0)

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                self._one()
            except (OSError, HTTPException, ValueError) as error:
                self.lost.append(repr(error))

    def _one(self) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        asked = {
            "model": MODEL,
            "prompt": OAK_PROMPT,
            "max_tokens": 200,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
        answer, last, ended = connection.getresponse(), None, False
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if last is not None:
                self.gaps.append(now - last)
            last = now
            ended = ended or b'"finish_reason":"length"' in line.replace(b" ", b"")
        connection.close()
        if ended:
            self.whole += 1
        else:
            self.lost.append("an answer was not whole")


@contextmanager
def honest(port: int) -> Iterator[Honest]:
    client = Honest(port)
    client.thread.start()
    try:
        yield client
    finally:
        client.stop.set()
        client.thread.join(60)


def answers(port: int, bodies: Iterable[Json]) -> list[tuple[int, Json]]:
    """Return the status and body of each answer, a few asked for at a time."""
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        return list(clients.map(partial(post, port, "/v1/chat/completions"), bodies))


def provoked(sample: Sample) -> Json:
    """Return a request for a grammar with a bias toward the letter by which it hurts, long enough that it would."""
    return body(sample, logit_bias={str(ids(sample.letter)[0]): 50}, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def accepted(served: Node) -> tuple[float, list[tuple[int, Json]]]:
    """Return the answers to the ordinary grammars, and the worst gap beside them: the engine's own."""
    with honest(served.port) as client:
        answered = answers(served.port, map(body, BENIGN))
    assert not client.lost
    return client.worst(), answered


def test_no_explosive_grammar_holds_the_engine_or_costs_its_neighbour_an_answer(
    served: Node, accepted: tuple[float, list[tuple[int, Json]]]
) -> None:
    before = {role: seen.pid for role, seen in served.observe().items()}
    own_gap, _ = accepted
    refused, ended, answered = [], [], []
    with honest(served.port) as client:
        for sample, (status, answer) in zip(ATTACKS, answers(served.port, map(provoked, ATTACKS)), strict=True):
            if status == 200:
                answered.append(sample.name)
            elif answer["error"]["code"] == "engine_refused":
                ended.append(sample.name)
            else:
                assert (status, answer["error"]["code"]) == (400, "invalid_request"), (sample.name, answer)
                named = answer["error"]["param"].partition(".")[0]
                assert named in {"regex", "ebnf", "response_format", "structural_tag"}
                refused.append(sample.name)
    log.info("worst gap %.3f s", client.worst())
    log.info("the engine's own %.3f s", own_gap)
    log.info("refused %d, ended %s, answered %s, honest %d", len(refused), ended, answered, client.whole)
    assert len(ATTACKS) >= 40
    assert len(refused) > len(ATTACKS) // 2
    assert not client.lost
    assert client.worst() < own_gap + GAP_S
    now = {role: seen.pid for role, seen in served.observe().items()}
    assert {role: pid for role, pid in now.items() if role != "checker"} == {
        role: pid for role, pid in before.items() if role != "checker"
    }


def test_usual_grammars_are_accepted(accepted: tuple[float, list[tuple[int, Json]]]) -> None:
    _, answered = accepted
    assert [
        (sample.name, answer) for sample, (status, answer) in zip(BENIGN, answered, strict=True) if status != 200
    ] == []


def honest_took_s(port: int, word: str) -> float:
    """Return how long a small grammar took that no cache has."""
    began_at = time.perf_counter()
    status, answer = post(
        port, "/v1/chat/completions", body(Sample("honest", "regex", f"({word}|maybe), [a-z]{{3,9}}"))
    )
    assert status == 200, answer
    return time.perf_counter() - began_at


def test_schemas_of_clients_that_have_left_delay_no_other(served: Node) -> None:
    alone_s = honest_took_s(served.port, "yes")  # on this machine now
    patterns = [f"^[a-z]{{1,{number % 40 + 1}}}(-[a-z0-9]{{1,20}}){{0,{number % 7}}}x" for number in range(1500)]
    for attacker in range(8):
        fields = {f"p{i}": {"type": "string", "pattern": f"{text}{attacker}$"} for i, text in enumerate(patterns)}
        heavy = Sample("heavy", "json_schema", json.dumps({"type": "object", "properties": fields}))
        connection = HTTPConnection("127.0.0.1", served.port, timeout=60)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body(heavy)), {"content-type": "application/json"}
        )
        connection.sock.settimeout(0.05)
        time.sleep(0.05)
        connection.close()
    took_s = honest_took_s(served.port, "no")
    log.info("took %.2f s, %.2f s before the attack", took_s, alone_s)
    assert took_s < 5.0 + 4 * alone_s


def test_a_grammar_that_becomes_expensive_in_mid_answer_ends_that_answer_alone(served: Node) -> None:
    """Catalan numbers of ways to read a text: cheap for some hundred tokens, so that no walk refuses it."""
    growing = Sample("Catalan", "ebnf", 'root ::= s "b"\ns ::= s s | "a"')
    bias = {str(ids("a")[0]): 100}
    with honest(served.port) as client:
        status, answer = post(
            served.port, "/v1/chat/completions", body(growing, logit_bias=bias, max_tokens=1500, ignore_eos=True)
        )
    log.info("%d %s, worst gap %.3f s", status, answer.get("error", answer.get("usage")), client.worst())
    assert status in {200, 400}
    if status == 400:
        assert answer["error"]["code"] in {"engine_refused", "invalid_request"}
    assert not client.lost
