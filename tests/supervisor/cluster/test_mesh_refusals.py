"""Nodes that do not belong to the cluster are refused, by a sentence in the log of both ends."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.link.greeting import Incarnation
from supervisor.links.tls import LinkTls
from tests.rig import certificate
from tests.rig.nodes import QUICK, Node, Reasons, all_linked, linked_nodes, until


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"secret": b"another secret that is long enough"}, "it has another secret, or none"),
        ({"section": evolve(QUICK, name="heath")}, "is of another cluster, "),
        ({"secret": b""}, "it has another secret, or none"),
    ],
    ids=["another secret", "another cluster", "no secret"],
)
async def test_a_node_that_does_not_belong_to_the_cluster_is_refused(
    fields: dict[str, Any], sentence: str, reasons: Reasons, rather_slow: MockClock
) -> None:
    a, b = Node("a", **fields), Node("b")
    async with linked_nodes(a, b):
        await until(lambda: len(reasons()) >= 2)
        await trio.sleep(0.5)
        assert a.linked == b.linked == set()
    assert [sentence in reason for reason in reasons()] == [True, True]


async def test_of_two_processes_of_one_name_one_answers_and_the_other_is_refused(
    reasons: Reasons, rather_slow: MockClock
) -> None:
    front, backs = Node("front"), [Node("back"), Node("back")]
    answers = []
    async with linked_nodes(front, *backs, know=False):
        for number, back in enumerate(backs):
            back.links.incarnation = Incarnation(f"run-{number}", 1_700_000_000 + number)
            back.knows(front)
        await until(lambda: front.linked == {"back"} and len(front.directory.workers("oak")) == 2)
        for number in range(12):
            answers.append(await front.ask(backs[0], request_id=f"{number:032x}"))
            await trio.sleep(0.05)
        assert sum("front" in back.linked for back in backs) == 1
        assert sum("front" in back.directory.name_conflicts for back in backs) == 1
    assert answers == [[0, 1, 2]] * 12
    assert sum("two processes call themselves back" in reason for reason in reasons()) == 2, "one for each end"


async def test_a_second_process_is_told_of_the_name_conflict_by_a_node_that_has_dialed_the_first(
    reasons: Reasons, rather_slow: MockClock
) -> None:
    ahead, backs = Node("ahead"), [Node("back"), Node("back")]
    async with linked_nodes(ahead, *backs, know=False) as nursery:
        for number, back in enumerate(backs):
            back.links.incarnation = Incarnation(f"run-{number}", 1_700_000_000 + number)
        ahead.knows(backs[0])
        await until(lambda: backs[0].linked == {"ahead"})
        nursery.start_soon(ahead.links.keep_linked, None, backs[1].endpoint)  # as an address to join at
        await until(lambda: "ahead" in backs[1].directory.name_conflicts)
        assert await ahead.ask(backs[0]) == [0, 1, 2]
        assert backs[1].linked == set()
    assert sum("two processes call themselves back" in reason for reason in reasons()) == 2, "one for each end"


# TLS ---------------------------------------------------------------------------------------


def mutual_tls(*, sends: bool = True) -> LinkTls:
    """Return contexts in which both ends ask for a certificate; without `sends` a node that dials has none."""
    path, key = certificate.files()
    contexts = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        context = ssl.create_default_context(purpose, cafile=str(path))
        if sends or purpose is ssl.Purpose.CLIENT_AUTH:
            context.load_cert_chain(path, key)
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    return LinkTls(contexts[0], contexts[1])


async def test_nodes_with_certificates_need_no_secret(rather_slow: MockClock) -> None:
    a, b = (Node(name, secret=b"", tls=mutual_tls()) for name in "ab")
    async with linked_nodes(a, b):
        await all_linked(a, b)
        assert await a.ask(b) == await b.ask(a) == [0, 1, 2]


async def test_a_node_without_a_certificate_is_refused(reasons: Reasons, rather_slow: MockClock) -> None:
    a, b = Node("a", tls=mutual_tls(sends=False)), Node("b", tls=mutual_tls())
    async with linked_nodes(a, b):
        await until(lambda: len(reasons()) >= 2)
        await trio.sleep(0.5)
        assert a.linked == b.linked == set()
    sentences = ("peer did not return a certificate", "it may not take this node's certificate")
    assert [sum(sentence in reason for reason in reasons()) for sentence in sentences] == [1, 1]
    assert len(reasons()) == 2


async def test_a_node_without_tls_and_one_with_it_do_not_link(reasons: Reasons, rather_slow: MockClock) -> None:
    a, b = Node("a"), Node("b", tls=mutual_tls())
    async with linked_nodes(a, b):
        await until(reasons)
        await trio.sleep(0.5)
        assert a.linked == b.linked == set()
    assert 1 <= len(reasons()) <= 4
