"""The verdicts of the checked clients, and the files of a cluster."""

import socket
from pathlib import Path

import pytest

from bench.rig.checked_clients import (
    AnswerOutcome,
    CheckedRequest,
    CompleteAnswer,
    GatewayInterruptions,
    Tally,
    complete_answers,
    outcome_of_stream,
    verdict,
)
from bench.rig.clients import Outcome
from bench.rig.cluster import FRONT, Cluster, Plan, simulated
from bench.rig.node import free_ports
from supervisor.engines.kinds import read_cluster

RIGHT = CompleteAnswer("An oak stands by the river.", "stop", 9, (("An", -0.5),))
STREAM = CheckedRequest("stream", "Tell me about the oak", None)
UP = GatewayInterruptions()
WITHIN_S = 30.0


def judged(
    outcome: AnswerOutcome, wanted: CheckedRequest = STREAM, *, left: bool = False, gateway: GatewayInterruptions = UP
) -> str:
    return verdict(wanted, outcome, RIGHT, left=left, gateway=gateway)[0]


# Verdicts --------------------------------------------------------------------------------


def test_an_answer_is_whole_when_text_reason_and_count_are_right() -> None:
    assert judged(AnswerOutcome([CompleteAnswer(RIGHT.text, "stop", 9)])) == "whole"
    assert (
        judged(AnswerOutcome([CompleteAnswer(RIGHT.text, "stop", 9, (("An", -0.51),))])) == "whole"
    )  # rounded otherwise


@pytest.mark.parametrize(
    "answer",
    [
        CompleteAnswer("An oak stands by the", "stop", 9),
        CompleteAnswer(RIGHT.text, "length", 9),
        CompleteAnswer(RIGHT.text, "stop", 8),
        CompleteAnswer(RIGHT.text, "stop", 9, (("An", -0.6),)),
        CompleteAnswer(RIGHT.text, "stop", 9, (("The", -0.5),)),
        CompleteAnswer(RIGHT.text, "stop", 9, ()),
    ],
)
def test_an_answer_that_claims_to_be_whole_and_differs_is_wrong(answer: CompleteAnswer) -> None:
    assert judged(AnswerOutcome([answer])) == "WRONG"


def test_of_two_answers_both_must_be_there() -> None:
    two = CheckedRequest("two", STREAM.prompt, None)
    assert judged(AnswerOutcome([RIGHT, RIGHT]), two) == "whole"
    assert judged(AnswerOutcome([RIGHT]), two) == "WRONG"


@pytest.mark.parametrize("error", ["engine_lost", None])
def test_what_came_before_an_error_must_be_the_beginning_of_the_answer(error: str | None) -> None:
    assert judged(AnswerOutcome(begun="An elm", error=error)) == "WRONG"
    assert judged(AnswerOutcome(begun="An elm", error=error), left=True) == "WRONG"


def test_an_answer_may_end_in_an_error_but_not_without_one() -> None:
    assert judged(AnswerOutcome(begun="An oak", error="engine_lost")) == "error engine_lost"
    assert judged(AnswerOutcome(begun="An oak", status=200)) == "CUT"
    assert judged(AnswerOutcome(error="no end")) == "NO END"


def test_a_refusal_comes_before_the_first_token() -> None:
    assert judged(AnswerOutcome(error="draining", status=503)) == "refused draining"
    assert judged(AnswerOutcome(begun="An oak", error="draining", status=200)) == "error draining"
    assert judged(AnswerOutcome(error="engine_lost", status=502)) == "error engine_lost"


def test_a_connection_may_end_without_an_error_only_when_its_gateway_was_killed() -> None:
    cut = AnswerOutcome(begun="An oak", error="connection", status=200)
    assert judged(cut, gateway=GatewayInterruptions(kills=1)) == "connection lost with the front"
    assert judged(cut, gateway=GatewayInterruptions(terminations=1)) == "CUT"


def test_a_gateway_that_got_sigterm_may_refuse_connections() -> None:
    assert (
        judged(AnswerOutcome(error="connection"), gateway=GatewayInterruptions(terminations=1))
        == "refused nobody is there"
    )
    assert judged(AnswerOutcome(error="connection")) == "CUT"


@pytest.mark.parametrize(
    ("before", "now", "kills"), [((0, 0), (0, 0), 0), ((0, 0), (1, 0), 1), ((1, 0), (1, 0), 1), ((1, 0), (2, 0), 1)]
)
def test_interruptions_since_a_request_began_include_those_that_lasted_then(
    before: tuple[int, int], now: tuple[int, int], kills: int
) -> None:
    assert GatewayInterruptions(*now).since(GatewayInterruptions(*before)).kills == kills


def test_a_stream_that_failed_has_the_code_of_its_error() -> None:
    assert outcome_of_stream(Outcome(text="An", error={"code": "draining"}, status=200)) == AnswerOutcome(
        [], "An", "draining", 200
    )
    late = Outcome(error={"code": "connection", "message": "TimeoutError('timed out')"})
    assert outcome_of_stream(late).error == "no end"


def test_the_tokens_of_several_choices_are_shared_out() -> None:
    choice = {"message": {"content": "a"}, "finish_reason": "stop"}
    assert (
        complete_answers({"choices": [choice, choice], "usage": {"completion_tokens": 6}})
        == [CompleteAnswer("a", "stop", 3)] * 2
    )


def test_a_tally_keeps_wrong_answers_with_their_request() -> None:
    tally = Tally()
    tally.note(STREAM, "whole", None, 1.0)
    tally.note(STREAM, "CUT", "it ended", 2.0)
    assert (tally.requests, tally.slowest_s, len(tally.bad)) == (2, 2.0, 1)
    assert "Tell me about the oak" in tally.bad[0]


# The file of each node -------------------------------------------------------------------


def test_each_node_reads_the_same_cluster_with_a_gateway_port_of_its_own(tmp_path: Path) -> None:
    pair = {"p": simulated("p", "prefill", costs={"transfer_s": 0.1}), "d": simulated("d", "decode", length_max=90)}
    target = Cluster(Plan(pair, drain_s=2.0), tmp_path)
    target.dialed_ports["p"] = 1234
    for name in target.plan.names:
        (tmp_path / name / "cluster.toml").write_text(target.file(name))
        read = read_cluster(tmp_path / name / "cluster.toml")
        assert (read.gateway_nodes, read.gateway.port) == ((name,), target.gateway_ports[name])
        assert read.node[FRONT].listen is None
        assert str(read.node["d"].listen) == f"127.0.0.1:{target.link_ports['d']}"
        assert str(read.node["p"].listen) == f"127.0.0.1:{target.link_ports['p'] if name == 'p' else 1234}"
        assert (read.engine["tiny-p"].leg, read.engine["tiny-d"].simulated.length_max) == ("prefill", 90)  # type: ignore[attr-defined]
        assert read.node["p"].drain_s == 2.0


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_free_ports_are_none_that_outgoing_connections_get() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert max(free_ports(20)) < min(server.getsockname()[1], client.getsockname()[1])
