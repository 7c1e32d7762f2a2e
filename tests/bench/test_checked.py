"""What the clients of chaos call whole, wrong, cut or fair, and what the proxy before a node does to its connections."""

import socket
import time
from contextlib import ExitStack
from random import Random

import pytest

from bench._checked import Ask, Door, Heard, Said, Tally, heard_of, verdict, whole_of
from bench._client import Outcome
from bench._cluster import FRONT, Cluster, Plan, free_ports, simulated
from bench._cutter import Cutter
from supervisor import config

RIGHT = Said("An oak stands by the river.", "stop", 9, (("An", -0.5),))
STREAM = Ask("stream", "Tell me about the oak", None)
UP = Door()


def judged(heard, wanted=STREAM, *, left=False, door=UP):
    return verdict(wanted, heard, RIGHT, left=left, door=door)[0]


# Verdicts --------------------------------------------------------------------------------


def test_an_answer_is_whole_when_text_reason_and_count_are_right():
    assert judged(Heard([Said(RIGHT.text, "stop", 9)])) == "whole"


@pytest.mark.parametrize(
    "said",
    [
        Said("An oak stands by the", "stop", 9),
        Said(RIGHT.text, "length", 9),
        Said(RIGHT.text, "stop", 8),
        Said(RIGHT.text, "stop", 9, (("An", -0.6),)),
    ],
)
def test_an_answer_that_claims_to_be_whole_and_differs_is_wrong(said):
    assert judged(Heard([said])) == "WRONG"


def test_of_two_answers_both_must_be_there():
    two = Ask("two", STREAM.prompt, None)
    assert judged(Heard([RIGHT, RIGHT]), two) == "whole"
    assert judged(Heard([RIGHT]), two) == "WRONG"


@pytest.mark.parametrize("error", ["engine_lost", None])
def test_what_came_before_an_error_must_be_the_beginning_of_the_answer(error):
    assert judged(Heard(begun="An elm", error=error)) == "WRONG"
    assert judged(Heard(begun="An elm", error=error), left=True) == "WRONG"


def test_an_error_is_a_fair_end_and_silence_is_none():
    assert judged(Heard(begun="An oak", error="engine_lost")) == "error engine_lost"
    assert judged(Heard(begun="An oak", status=200)) == "CUT"
    assert judged(Heard(error="no end")) == "NO END"


def test_a_connection_may_end_without_a_word_only_when_its_door_was_killed():
    cut = Heard(begun="An oak", error="connection", status=200)
    assert judged(cut, door=Door(killed=1)) == "connection lost with the door"
    assert judged(cut, door=Door(told=1)) == "CUT"


def test_a_door_that_was_told_to_end_may_refuse_connections():
    assert judged(Heard(error="connection"), door=Door(told=1)) == "connection lost with the door"
    assert judged(Heard(error="connection")) == "CUT"


@pytest.mark.parametrize(
    ("before", "now", "killed"), [((0, 0), (0, 0), 0), ((0, 0), (1, 0), 1), ((1, 0), (1, 0), 1), ((1, 0), (2, 0), 1)]
)
def test_what_happened_to_a_door_since_a_request_began_includes_what_was_so_already(before, now, killed):
    assert Door(*now).since(Door(*before)).killed == killed


def test_a_stream_that_failed_tells_why():
    assert heard_of(Outcome(text="An", error={"code": "draining"}, status=200)) == Heard([], "An", "draining", 200)
    late = Outcome(error={"code": "connection", "message": "TimeoutError('timed out')"})
    assert heard_of(late).error == "no end"


def test_the_tokens_of_several_choices_are_shared_out():
    choice = {"message": {"content": "a"}, "finish_reason": "stop"}
    assert whole_of({"choices": [choice, choice], "usage": {"completion_tokens": 6}}) == [Said("a", "stop", 3)] * 2


def test_a_tally_keeps_what_was_bad_with_the_request():
    tally = Tally()
    tally.note(STREAM, "whole", None, 1.0)
    tally.note(STREAM, "CUT", "it ended", 2.0)
    assert (tally.requests, tally.slowest_s, len(tally.bad)) == (2, 2.0, 1)
    assert "Tell me about the oak" in tally.bad[0]


# The file of each node -------------------------------------------------------------------


def test_each_node_reads_the_same_cluster_with_a_window_of_its_own(tmp_path):
    pair = {"p": simulated("p", "prefill", costs={"transfer_s": 0.1}), "d": simulated("d", "decode", length_max=90)}
    of = Cluster(Plan(pair, drain_s=2.0), tmp_path)
    of.doors["p"] = 1234
    for name in of.plan.names:
        (tmp_path / name / "cluster.toml").write_text(of.file(name))
        read = config.read(tmp_path / name / "cluster.toml")
        assert (read.gateway.node, read.gateway.port) == (name, of.windows[name])
        assert read.node[FRONT].listen is None
        assert read.node["d"].listen == f"127.0.0.1:{of.links['d']}"
        assert read.node["p"].listen == f"127.0.0.1:{of.links['p'] if name == 'p' else 1234}"
        assert (read.engine["tiny-p"].leg, read.engine["tiny-d"].simulated.length_max) == ("prefill", 90)
        assert read.node["p"].drain_s == 2.0


def test_ports_that_are_taken_together_differ():
    assert len(set(free_ports(20))) == 20


# The proxy -------------------------------------------------------------------------------


@pytest.fixture
def stack():
    with ExitStack() as made:
        yield made


def joined(stack):
    """Return the proxy, and both ends of a connection through it."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    cutter = Cutter(listener.getsockname()[1])
    stack.callback(cutter.close)
    near = stack.enter_context(socket.create_connection(("127.0.0.1", cutter.port), 5))
    far = stack.enter_context(listener.accept()[0])
    far.settimeout(5)
    near.sendall(b"hello")
    assert far.recv(10) == b"hello"
    return cutter, near, far


def has_ended(end):
    """Wait for the end of a connection, by whichever word it comes."""
    end.settimeout(5)
    try:
        return end.recv(10) == b""
    except ConnectionResetError:
        return True


@pytest.mark.realtime
def test_the_proxy_passes_bytes_both_ways_and_each_end_by_itself(stack):
    _, near, far = joined(stack)
    near.shutdown(socket.SHUT_WR)
    assert far.recv(10) == b""
    far.sendall(b"still here")
    assert near.recv(10) == b"still here"


@pytest.mark.realtime
@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_connection_ends_at_both_ends(reset, stack):
    cutter, near, far = joined(stack)
    assert cutter.cut(Random(1), reset=reset)
    for end in (near, far):
        assert has_ended(end)


@pytest.mark.realtime
def test_a_held_connection_says_nothing_until_it_flows_again(stack):
    cutter, near, far = joined(stack)
    held = cutter.hold(Random(1))
    near.sendall(b"late")
    far.settimeout(0.1)
    with pytest.raises(TimeoutError):
        far.recv(10)
    held.flows.set()
    far.settimeout(5)
    assert far.recv(10) == b"late"


@pytest.mark.realtime
def test_who_is_refused_finds_the_connection_ended(stack):
    cutter, near, _ = joined(stack)
    cutter.refuse(30.0)
    assert has_ended(near)
    fresh = stack.enter_context(socket.create_connection(("127.0.0.1", cutter.port), 5))
    assert has_ended(fresh)
    cutter.heal()


@pytest.mark.realtime
def test_with_no_connection_there_is_nothing_to_cut(stack):
    cutter, near, far = joined(stack)
    near.close()
    far.close()
    deadline = time.monotonic() + 5
    while cutter.cut(Random(1), reset=False) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not cutter.cut(Random(1), reset=False)
    assert cutter.hold(Random(1)) is None
