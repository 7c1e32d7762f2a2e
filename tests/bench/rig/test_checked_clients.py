"""The verdicts of the checked clients, the files of a cluster, and the faults of the proxy before a node."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from threading import Thread

import pytest
from websockets.sync.server import ServerConnection, serve

from bench.rig.checked_clients import (
    AnswerOutcome,
    CheckedRequest,
    CompleteAnswer,
    GatewayInterruptions,
    Tally,
    complete_answers,
    outcome_of_stream,
    send,
    verdict,
)
from bench.rig.clients import Outcome
from bench.rig.cluster import FRONT, Cluster, Plan, simulated
from bench.rig.node import free_ports
from bench.rig.proxy import SLOW_CHUNK_BYTES, FaultProxy
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


# A WebSocket that closes -----------------------------------------------------------------


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("events", "code", "verdict"),
    [([], 1012, "refused draining"), ([], 1000, "CUT"), ([{"type": "response.created"}], 1012, "CUT")],
)
def test_a_socket_that_closes_to_restart_refuses_only_what_it_has_not_begun(
    events: list[dict[str, str]], code: int, verdict: str, stack: ExitStack[bool | None]
) -> None:
    def handler(connection: ServerConnection) -> None:
        connection.recv()
        for event in events:
            connection.send(json.dumps(event))
        connection.close(code)

    server = stack.enter_context(serve(handler, "127.0.0.1", 0))
    thread = Thread(target=server.serve_forever)
    thread.start()
    response = CheckedRequest("response", STREAM.prompt, None)
    try:
        assert judged(send(server.socket.getsockname()[1], response), response) == verdict
    finally:
        server.shutdown()
        thread.join()


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


# The proxy -------------------------------------------------------------------------------


@pytest.fixture
def stack() -> Iterator[ExitStack[bool | None]]:
    with ExitStack() as exit_stack:
        yield exit_stack


def joined(stack: ExitStack[bool | None]) -> tuple[FaultProxy, socket.socket, socket.socket]:
    """Return the proxy, and both ends of a connection through it."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    cutter = FaultProxy(listener.getsockname()[1])
    stack.callback(cutter.close)
    near = stack.enter_context(socket.create_connection(("127.0.0.1", cutter.port), WITHIN_S))
    far = stack.enter_context(listener.accept()[0])
    far.settimeout(WITHIN_S)
    near.sendall(b"hello")
    assert far.recv(10) == b"hello"
    return cutter, near, far


def has_ended(end: socket.socket) -> bool:
    """Wait for the end of a connection, by a close or a reset."""
    end.settimeout(WITHIN_S)
    try:
        return end.recv(10) == b""
    except ConnectionResetError:
        return True


@pytest.mark.realtime
def test_the_proxy_passes_bytes_both_ways_and_each_end_by_itself(stack: ExitStack[bool | None]) -> None:
    _, near, far = joined(stack)
    near.shutdown(socket.SHUT_WR)
    assert far.recv(10) == b""
    far.sendall(b"still here")
    assert near.recv(10) == b"still here"


@pytest.mark.realtime
@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_connection_ends_at_both_ends(reset: bool, stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    assert cutter.cut(Random(1), reset=reset)
    for end in (near, far):
        assert has_ended(end)


def hears(end: socket.socket, sent: bytes, within_s: float = WITHIN_S) -> bool:
    """Whether these very bytes come at this end in time."""
    end.settimeout(within_s)
    try:
        return end.recv(10) == sent
    except TimeoutError:
        return False


@pytest.mark.realtime
def test_a_held_connection_delivers_nothing_until_it_flows_again(stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    held = cutter.hold(Random(1))
    near.sendall(b"late")
    far.sendall(b"late too")
    assert not hears(far, b"late", 0.1)
    assert not hears(near, b"late too", 0.1)
    assert held is not None
    held.flow()
    assert hears(far, b"late")
    assert hears(near, b"late too")


@pytest.mark.realtime
def test_a_half_open_connection_passes_bytes_one_way_only(stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    held = cutter.hold(Random(1), one_way=True)
    near.sendall(b"there")
    far.sendall(b"back")
    assert held is not None
    there = (far, b"there"), (near, b"back")
    open_end, held_end = there if held.directions[0].is_set() else there[::-1]
    assert hears(*open_end)
    assert not hears(*held_end, 0.2)
    held.flow()
    assert hears(*held_end)


@pytest.mark.realtime
def test_a_slow_connection_passes_everything_piece_by_piece(stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    slowed = cutter.slow(Random(1), 0.05)
    near.sendall(b"first")  # what is read after it is read in small pieces
    assert hears(far, b"first")
    sent = bytes(range(256)) * (4 * SLOW_CHUNK_BYTES // 256)
    near.sendall(sent)
    begin, received = time.monotonic(), b""
    while len(received) < len(sent):
        received += far.recv(len(sent))
    assert (received, time.monotonic() - begin > 0.15) == (sent, True)
    assert slowed is not None
    slowed.flow()


@pytest.mark.realtime
def test_a_healed_connection_flows_again(stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    cutter.hold(Random(1))
    near.sendall(b"late")
    cutter.heal()
    assert hears(far, b"late")


@pytest.mark.realtime
def test_refused_connections_are_closed(stack: ExitStack[bool | None]) -> None:
    cutter, near, _ = joined(stack)
    cutter.refuse(300.0)
    assert has_ended(near)
    fresh = stack.enter_context(socket.create_connection(("127.0.0.1", cutter.port), WITHIN_S))
    assert has_ended(fresh)
    cutter.heal()


@pytest.mark.realtime
def test_without_a_connection_nothing_is_cut_or_held(stack: ExitStack[bool | None]) -> None:
    cutter, near, far = joined(stack)
    near.close()
    far.close()
    deadline = time.monotonic() + WITHIN_S
    while cutter.cut(Random(1), reset=False) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not cutter.cut(Random(1), reset=False)
    assert cutter.hold(Random(1)) is None
