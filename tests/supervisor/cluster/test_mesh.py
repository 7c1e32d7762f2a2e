"""Nodes find each other, find each other again, and let nobody else in."""

from __future__ import annotations

import itertools
import logging
import ssl

import pytest
import trio
import trio.lowlevel
import trio.testing
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import greeting
from protocol.cluster import Leg, Neighbour, NodeState, Offer
from protocol.codec import encode as body
from protocol.errors import LinkLost, LinkReplaced, PeerLost, PeerRefused, PeerViolation
from protocol.frames import (
    VERSION,
    Announce,
    Bye,
    Cancel,
    Credit,
    End,
    Fail,
    Hello,
    Item,
    KeepAlive,
    Open,
    ReplyData,
    RequestData,
    Step,
    WindowUpdate,
    encode,
)
from protocol.greeting import Incarnation
from protocol.messages import EngineInfo, Tokens
from protocol.text_messages import Text
from supervisor.links import websocket
from supervisor.links.endpoint import Endpoint
from supervisor.links.handshake_stream import HANDSHAKE_BYTES_MAX, HANDSHAKE_READ_BYTES, LimitedStream
from supervisor.links.tls import LinkTls
from tests.rig import certificate
from tests.rig.fake_engine import generate
from tests.rig.log_records import log_records
from tests.rig.nodes import (
    LOOPBACK_HOSTS,
    QUICK,
    SECRET,
    UPGRADE,
    Node,
    all_linked,
    ended,
    handshake_as_peer,
    linked_nodes,
    raw_connection,
    until,
)

pytestmark = pytest.mark.realtime  # WebSockets on loopback, and their timeouts


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    """What the links log: each line's word and its reason."""
    caplog.set_level(logging.INFO)
    return lambda: [
        (each.message, each.peer, getattr(each, "reason", ""))
        for each in log_records(caplog)
        if each.name.startswith("supervisor.")
    ]


def reasons(lines):
    return [reason for what, _, reason in lines() if what == "no link"]


# Finding each other ------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
async def test_three_nodes_find_each_other_whatever_the_order_they_start_in(order: tuple[str, ...]) -> None:
    nodes = {name: Node(name) for name in order}
    async with trio.open_nursery() as nursery:
        for name in order:
            await nursery.start(nodes[name].run)
            for other in nodes.values():
                if other is not nodes[name] and other.links.port is not None:
                    nodes[name].knows(other)
                    other.knows(nodes[name])
        await all_linked(*nodes.values())
        await until(lambda: all(len(node.directory.workers("oak")) == 3 for node in nodes.values()))
        for one, other in itertools.permutations(nodes.values(), 2):
            assert await one.ask(other) == [0, 1, 2]
        nursery.cancel_scope.cancel()


async def test_of_two_nodes_the_first_by_name_dials_and_there_is_one_link() -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(a, b):
        await all_linked(a, b)
        await trio.sleep(0.3)
        assert a.links.statistics().dialers["b"] == b.links.statistics().dialers["a"] == "a"
        assert (a.links.statistics().dialing, b.links.statistics().dialing) == ({"b"}, set())


async def test_a_node_that_does_not_listen_dials_whatever_its_name() -> None:
    a, z = Node("a"), Node("z", port=None)
    async with linked_nodes(a, z):
        await all_linked(a, z)
        assert a.links.statistics().dialers["z"] == "z"
        assert await a.ask(z) == await z.ask(a) == [0, 1, 2]


async def test_b16_a_node_that_listens_everywhere_is_found_at_its_host() -> None:
    a, z = Node("a"), Node("z", host="0.0.0.0")
    z.links.host = "box.example"
    async with linked_nodes(a, z, know=False):
        assert z.directory.address == f"box.example:{z.links.port}"


async def test_a_node_that_listens_everywhere_dials_since_nobody_can_find_it_there() -> None:
    a, z = Node("a"), Node("z", host="0.0.0.0")
    async with linked_nodes(a, z, know=False):
        z.knows(a)
        await all_linked(a, z)
        assert z.directory.address is None
        assert a.links.statistics().dialers["z"] == "z"


async def test_a_node_is_dialed_until_it_is_there(lines) -> None:
    early, late = Node("a"), Node("b")
    async with trio.open_nursery() as nursery:
        with (await trio.open_tcp_listeners(0, host=LOOPBACK_HOSTS))[0].socket as taken:
            port = taken.getsockname()[1]
        late.links.listen = Endpoint(LOOPBACK_HOSTS, port)
        early.directory.configure("b", f"{LOOPBACK_HOSTS}:{port}")
        await nursery.start(early.run)
        await trio.sleep(0.5)
        assert len(reasons(lines)) == 1
        assert f"{LOOPBACK_HOSTS}:{port} cannot be reached" in reasons(lines)[0]
        await nursery.start(late.run)
        await all_linked(early, late)
        nursery.cancel_scope.cancel()


# Finding each other again ------------------------------------------------------------------


async def test_after_a_cut_the_link_comes_back_and_its_streams_have_ended() -> None:
    a, b = Node("a"), Node("b", step_s=0.05)
    async with linked_nodes(a, b) as nursery:
        await all_linked(a, b)
        lost = a.link(b)

        async def cut() -> None:
            await until(lambda: b.asked)
            await trio.aclose_forcefully(lost.transport.stream)

        nursery.start_soon(cut)
        with pytest.raises(LinkLost):
            await a.ask(b, tokens_max=1000)
        await until(lambda: b.freed == ["r"])
        await until(lambda: a.link(b) not in {None, lost} and a.offers_of(b))
        b.step_s = 0
        assert await a.ask(b) == [0, 1, 2]


async def test_what_crosses_links_is_counted_for_nodes_alone_and_goes_on_with_a_nodes_next_link() -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(a, b):
        await all_linked(a, b)
        first = a.link(b)
        await trio.aclose_forcefully(first.transport.stream)
        await until(lambda: a.link(b) not in {None, first})
        assert a.link(b).traffic is first.traffic is a.links.traffic["b"]
        assert a.links.traffic["b"].messages_received > 2

        async def leave(wire) -> None:
            await wire.socket.aclose()

        for name in "xyz":
            await handshake_as_peer(a, name, leave, hello=False)
        assert set(a.links.traffic) == {"b"}


async def test_a_node_that_comes_back_by_a_new_link_takes_the_place_of_the_old_one() -> None:
    b = Node("b", section=evolve(QUICK, silent_s=60.0))
    async with linked_nodes(b), trio.open_nursery() as nursery:
        ends = []

        async def half_open(number: int) -> None:
            async def say(wire) -> None:
                ends.append(number)
                await trio.lowlevel.checkpoint()

            await handshake_as_peer(b, "a", say)
            ends.append(-number)

        nursery.start_soon(half_open, 1)
        await until(lambda: b.linked == {"a"})
        first = b.directory.nodes["a"].link
        nursery.start_soon(half_open, 2)
        await until(lambda: b.directory.nodes["a"].link not in {None, first})
        await until(lambda: -1 in ends)
        assert b.linked == {"a"}
        assert -2 not in ends
        nursery.cancel_scope.cancel()


async def test_greeting_alone_takes_no_links_place() -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(a, b):
        await all_linked(a, b)
        link = b.link(a)

        async def leave(wire) -> None:
            await wire.socket.aclose()

        await handshake_as_peer(b, "a", leave, hello=False)
        await trio.sleep(0.1)
        assert b.link(a) is link
        assert not link.lost
        assert await a.ask(b) == [0, 1, 2]


async def test_links_that_start_again_dial_again() -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(a, b) as nursery:
        await all_linked(a, b)
        a.scope.cancel()
        await until(lambda: b.linked == set())
        assert a.linked == set()
        await nursery.start(a.run)
        await all_linked(a, b)


async def test_a_leaver_says_why(lines) -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(a, b):
        await all_linked(a, b)
        a.links.send_bye("node a shuts down")
        await trio.sleep(0.1)
        a.scope.cancel()
        await until(lambda: "draining: node a shuts down" in reasons(lines))


# Joining -----------------------------------------------------------------------------------


async def answered(one: Node, other: Node) -> list[int]:
    """Ask as a router does: where both ends have dialed, what began on the link that makes room is asked again."""
    try:
        return await one.ask(other)
    except LinkReplaced:
        return await one.ask(other, request_id="again")


@pytest.mark.parametrize("name", ["0-first", "z-last"])
async def test_a_node_that_joins_one_is_learned_by_all_leaves_and_comes_back(name: str) -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(a, b) as nursery:
        joiner = Node(name, join=(b.at,))
        await nursery.start(joiner.run)
        await all_linked(a, b, joiner)
        await until(lambda: all(len(node.directory.workers("oak")) == 3 for node in (a, b, joiner)))
        assert await answered(a, joiner) == await answered(joiner, a) == [0, 1, 2]
        joiner.links.send_bye("it leaves")
        joiner.scope.cancel()
        await until(lambda: name not in a.linked | b.linked)
        assert a.offers_of(joiner) == b.offers_of(joiner) == []
        elsewhere = Node(name, join=(a.at,))  # another port: nobody knows it there
        await nursery.start(elsewhere.run)
        await all_linked(a, b, elsewhere)
        assert await answered(b, elsewhere) == [0, 1, 2]


async def test_two_that_join_and_may_both_dial_keep_one_steady_link() -> None:
    a = Node("a")
    async with linked_nodes(a) as nursery:
        joiners = [Node(name, join=(a.at,)) for name in ("j", "k")]
        for joiner in joiners:
            await nursery.start(joiner.run)
        await all_linked(a, *joiners)
        await trio.sleep(0.3)
        links = [joiners[0].link(joiners[1]), joiners[1].link(joiners[0]), a.link(joiners[0]), joiners[0].link(a)]
        await trio.sleep(0.7)
        assert links == [
            joiners[0].link(joiners[1]),
            joiners[1].link(joiners[0]),
            a.link(joiners[0]),
            joiners[0].link(a),
        ]
        assert not any(link.lost for link in links)


async def test_a_node_of_the_file_that_joins_too_has_one_steady_link() -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(b) as nursery:
        a.links.join = (Endpoint.read(b.at), Endpoint.read(b.at))
        a.directory.configure("b", b.at)
        await nursery.start(a.run)
        await all_linked(a, b)
        await trio.sleep(0.3)
        links = a.link(b), b.link(a)
        await trio.sleep(0.7)
        assert (a.link(b), b.link(a)) == links
        assert not any(link.lost for link in links)


# Refusals ----------------------------------------------------------------------------------

REFUSED = {
    "secret": ({"secret": b"another secret that is long enough"}, "it has another secret, or none"),
    "cluster": ({"section": evolve(QUICK, name="heath")}, "is of another cluster, grove"),
    "no secret": ({"secret": b""}, "it has another secret, or none"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_node_that_does_not_belong_here_is_refused_in_one_sentence_on_both_sides(what: str, lines) -> None:
    fields, sentence = REFUSED[what]
    a, b = Node("a", **fields), Node("b")
    async with linked_nodes(a, b):
        await trio.sleep(1.0)
        assert a.linked == b.linked == set()
    said = reasons(lines)
    assert len(said) == 2, said
    assert all(sentence in each or "is of another cluster, heath" in each for each in said)


async def test_two_nodes_of_one_name_refuse_each_other(lines) -> None:
    a, other = Node("a"), Node("a", port=None)
    async with linked_nodes(a):
        other.links.join = (Endpoint.read(a.at),)
        with trio.move_on_after(1):
            await other.run()
    said = reasons(lines)
    assert len(said) == 2
    assert all("has the same name" in each for each in said)


async def test_b9_of_two_processes_of_one_name_one_answers_and_the_other_is_refused(lines) -> None:
    front, backs = Node("front"), [Node("back"), Node("back")]
    for number, back in enumerate(backs):
        back.links.incarnation = Incarnation(f"run-{number}", 1_700_000_000 + number)
    answers = []
    async with linked_nodes(front, *backs, know=False):
        for back in backs:
            back.knows(front)
        await until(lambda: front.linked == {"back"} and len(front.directory.workers("oak")) == 2)
        for number in range(12):
            answers.append(await front.ask(backs[0], request_id=f"{number:032x}"))
            await trio.sleep(0.05)
        assert sum("front" in back.linked for back in backs) == 1
        assert sum("front" in back.directory.name_conflicts for back in backs) == 1
    assert answers == [[0, 1, 2]] * 12
    told = [reason for reason in reasons(lines) if "two processes call themselves back" in reason]
    assert len(told) == 2  # of both ends


async def test_a_node_in_anothers_place_is_refused(lines) -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(a, b, know=False):
        a.directory.configure("c", b.at)
        a.directory.notify()
        await trio.sleep(0.7)
    said = reasons(lines)
    assert len(said) == 2
    assert all("node c was expected in its place" in each for each in said)


async def test_another_version_is_refused(lines) -> None:
    b = Node("b")
    async with linked_nodes(b):

        async def talk(wire: websocket.WebSocketTransport) -> None:
            other = greeting.Greeting(VERSION, "grove", "a", bytes(32))
            await wire.send_all(greeting.encode(evolve(other, version=VERSION + 1)))
            await wire.receive_some()
            assert "speaks version" in greeting.decode(await wire.receive_some()).detail

        await websocket.dial(Endpoint.read(b.at), None, 1.0, talk)
        await until(lambda: reasons(lines))
    assert len(reasons(lines)) == 1
    assert f"it speaks version {VERSION + 1} of the protocol, and node b version {VERSION}" in reasons(lines)[0]
    assert b.linked == set()


# TLS ---------------------------------------------------------------------------------------


def mutual(*, shows: bool = True) -> LinkTls:
    path, key = certificate.files()
    contexts = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        context = ssl.create_default_context(purpose, cafile=str(path))
        if shows or purpose is ssl.Purpose.CLIENT_AUTH:
            context.load_cert_chain(path, key)
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    return LinkTls(*contexts)


async def test_nodes_show_each_other_certificates() -> None:
    a, b = (Node(name, secret=b"", tls=mutual()) for name in "ab")
    async with linked_nodes(a, b):
        await all_linked(a, b)
        assert await a.ask(b) == await b.ask(a) == [0, 1, 2]


async def test_a_node_without_a_certificate_is_refused(lines) -> None:
    a, b = Node("a", tls=mutual(shows=False)), Node("b", tls=mutual())
    async with linked_nodes(a, b):
        await trio.sleep(1.0)
        assert a.linked == b.linked == set()
    said = reasons(lines)
    assert any("peer did not return a certificate" in each for each in said)
    assert any("it may not take this node's certificate" in each for each in said), said
    assert len(said) == 2, said


async def test_a_plain_node_and_a_secure_one_do_not_meet(lines) -> None:
    a, b = Node("a"), Node("b", tls=mutual())
    async with linked_nodes(a, b):
        await trio.sleep(1.0)
        assert a.linked == b.linked == set()
    assert 1 <= len(reasons(lines)) <= 4


# Strangers ---------------------------------------------------------------------------------

KNOCKS = {
    "nothing": b"",
    "zeros": bytes(100),
    "http": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "elsewhere": UPGRADE.replace(b"/link", b"/elsewhere"),
    "endless head": b"GET /link HTTP/1.1\r\nx: " + b"y" * (HANDSHAKE_BYTES_MAX + 1),
    "giant length": UPGRADE + b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff" + bytes(4) + b"x" * 100,
    "too much": UPGRADE + b"\x02\xff\x00\x00\x00\x00\x00\x10\x00\x00" + bytes(4) + bytes(HANDSHAKE_BYTES_MAX),
    "text": UPGRADE + b"\x81\x82" + bytes(4) + b"hi",
    "unmasked": UPGRADE + b"\x82\x02hi",
    "reserved": UPGRADE + b"\xf2\x82" + bytes(4) + b"hi",
    "ping": UPGRADE + b"\x89\x80" + bytes(4),
    "closes": UPGRADE + b"\x88\x80" + bytes(4),
    "frames at once": UPGRADE + b"\x82\x86" + bytes(4) + encode(KeepAlive())[:6],
}


@pytest.mark.parametrize("what", KNOCKS)
async def test_a_stranger_is_let_go_logged_once_and_disturbs_nobody(what: str, lines) -> None:
    a, b = Node("a", step_s=0.02), Node("b", step_s=0.02)
    async with linked_nodes(a, b) as nursery:
        await all_linked(a, b)
        got = []

        async def streams() -> None:
            got.append(await b.ask(a, tokens_max=30))

        nursery.start_soon(streams)
        for _ in range(3):
            async with raw_connection(a, KNOCKS[what]) as stream:
                if what in {"nothing", "closes"}:
                    await stream.send_eof()
                await ended(stream)
        await until(lambda: got)
        assert got == [list(range(30))]
        assert b.linked == {"a"}
        await until(lambda: not a.links.statistics().unauthenticated)
    said = [each for each in lines() if each[1] == LOOPBACK_HOSTS]
    assert 1 <= len(said) <= 2, said
    assert not [each for each in lines() if "bug" in each[0]]


async def test_a_stranger_is_read_a_little_at_a_time() -> None:
    near, far = trio.testing.memory_stream_pair()
    line = LimitedStream(far)
    await near.send_all(bytes(20_000))
    assert len(await line.receive_some(256 * 1024)) == len(await line.receive_some()) == HANDSHAKE_READ_BYTES
    line.lift_limit()
    assert len(await line.receive_some(256 * 1024)) == 20_000 - 2 * HANDSHAKE_READ_BYTES


@pytest.mark.parametrize("origin", [b"Origin: https://elsewhere.example", b"origin: null", b"ORIGIN: http://127.0.0.1"])
async def test_no_page_in_a_browser_opens_a_link(origin: bytes, lines) -> None:
    a = Node("a")
    async with linked_nodes(a), raw_connection(a, UPGRADE[:-2] + origin + b"\r\n\r\n") as stream:
        said = await ended(stream)
        await until(lambda: reasons(lines))
        assert a.linked == set()
    assert b" 403 " in said.splitlines()[0]
    assert reasons(lines) == ["a web page asked for a link"]


async def test_two_hundred_silent_connections_keep_no_node_out(lines) -> None:
    a, b = Node("a"), Node("b", section=evolve(QUICK, handshake_s=60.0, handshakes_max=20))
    async with linked_nodes(b) as nursery:
        silent = [await trio.open_tcp_stream(LOOPBACK_HOSTS, b.links.port) for _ in range(200)]
        await until(lambda: b.links.statistics().unauthenticated == 20)
        a.directory.configure("b", b.at)
        await nursery.start(a.run)
        await all_linked(a, b)
        for stream in silent:
            await trio.aclose_forcefully(stream)
        await until(lambda: not b.links.statistics().unauthenticated)
    assert len(reasons(lines)) <= 2


async def test_a_slow_handshake_has_its_time() -> None:
    a = Node("a", section=evolve(QUICK, handshake_s=0.2))
    async with linked_nodes(a), raw_connection(a) as stream:
        with trio.fail_after(2):
            with pytest.raises(trio.BrokenResourceError):
                for byte in UPGRADE:
                    await stream.send_all(bytes((byte,)))
                    await trio.sleep(0.05)


async def test_a_proof_that_was_overheard_proves_nothing(lines) -> None:
    b = Node("b")
    heard = []

    class Tapped(websocket.WebSocketTransport):
        async def send_all(self, data: bytes) -> None:
            heard.append(bytes(data))
            await super().send_all(data)

    async with linked_nodes(b):

        async def honest(wire: websocket.WebSocketTransport) -> None:
            greeter = greeting.Greeter("dials", "grove", "a", SECRET, bytes(32))
            await websocket.greet(Tapped(wire.socket, wire.stream), greeter, 1.0)

        async def replay(wire: websocket.WebSocketTransport) -> None:
            for message in heard:
                await wire.send_all(message)
            await wire.receive_some()
            refusal = greeting.decode(await wire.receive_some())
            assert refusal.code == "secret"

        await websocket.dial(Endpoint.read(b.at), None, 1.0, honest)
        assert len(heard) == 2
        await websocket.dial(Endpoint.read(b.at), None, 1.0, replay)
        await until(lambda: any("another secret" in each for each in reasons(lines)))
        assert b.linked == set()


async def test_sentences_that_a_stranger_thinks_of_do_not_fill_the_log(lines) -> None:
    a = Node("a")
    async with linked_nodes(a):
        for number in range(100):

            async def talk(wire: websocket.WebSocketTransport, number: int = number) -> None:
                await wire.send_all(greeting.encode(greeting.Greeting(VERSION, f"c{number}", "x", bytes(32))))
                while await wire.receive_some():
                    pass

            await websocket.dial(Endpoint.read(a.at), None, 1.0, talk)
        await until(lambda: not a.links.statistics().unauthenticated)
    assert 10 <= len(reasons(lines)) <= 60


# Peers that lie ----------------------------------------------------------------------------

INFO = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True)
GOOD = Offer("x-0", "oak", Leg.BOTH, 8, True, INFO)


def told(*offers: Offer, **fields: tuple[Neighbour]) -> bytes:
    return encode(Announce(body(NodeState(offers, **fields))))


LIES = {
    "bytes": b"\xff" * 20,
    "giant length": b"\x02\xff\xff\xff\xff",
    "second hello": encode(Hello(VERSION, "x", 1)),
    "wrong hello": encode(Hello(VERSION + 1, "x", 1)),
    "credit for nobody": encode(Credit(7, 1)),
    "reply for nobody": encode(Item(1, body(Tokens([1])), 1)),
    "end for nobody": encode(End(1, b"")),
    "step for nobody": encode(Step([1], [1], [1], [], [])),
    "credit abuse": encode(Open(1, body(generate()), 2**31 - 1, "a-0")) + encode(Credit(1, 2**31 - 1)),
    "negative credit": encode(Open(1, body(generate()), -1, "a-0")),
    "stream out of turn": encode(Open(2, body(generate()), 1, "a-0")),
    "nobody named": encode(Open(1, body(generate()), 1)),
    "not a request": encode(Open(1, b"\xff\xff", 1, "a-0")),
    "part of nothing": encode(ReplyData(1, b"x")),
    "body of nothing": encode(RequestData(1, b"x")),
    "too much attached": encode(Open(1, body(generate()), 1, "a-0", None, 2**40)),
    "told no state": encode(Announce(body(Text("x", 1)))),
    "two offers of one name": told(GOOD, GOOD),
    "no slots": told(evolve(GOOD, slots=0)),
    "negative load": told(evolve(GOOD, running=-1)),
    "kv of no number": told(evolve(GOOD, kv_used=float("nan"))),
    "an engine for nothing": told(evolve(GOOD, engine=evolve(INFO, request_tokens_max=0))),
    "a rendezvous nowhere": told(evolve(GOOD, engine=evolve(INFO, bootstrap=("h", 70000)))),
    "a neighbour nowhere": told(neighbours=(Neighbour("y", "127.0.0.1:99999"),)),
    "a neighbour without a name": told(neighbours=(Neighbour("\n", None),)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_peer_that_lies_loses_its_link_and_nobody_elses(lie: str, lines) -> None:
    a, b = Node("a", step_s=0.02), Node("b", step_s=0.02)
    async with linked_nodes(a, b) as nursery:
        await all_linked(a, b)
        got = []

        async def streams() -> None:
            got.append(await b.ask(a, tokens_max=30))

        nursery.start_soon(streams)

        async def say(wire) -> None:
            await wire.send_all(LIES[lie])

        for _ in range(3):
            await handshake_as_peer(a, "x", say)
        await until(lambda: got)
        assert got == [list(range(30))]
        assert a.linked == {"b"}
        assert not [each for each in a.directory.offers() if each.name == "x-0"]
        assert a.directory.running == 0
    said = [each for each in lines() if each[1] == "x"]
    assert [what for what, *_ in said if what != "linked"] == ["no link"], said
    assert len(said) <= 3, said  # linked, not, and linked once more


async def test_frames_before_the_greeting_are_refused(lines) -> None:
    a = Node("a")
    async with linked_nodes(a):

        async def talk(wire: websocket.WebSocketTransport) -> None:
            await wire.send_all(encode(Hello(VERSION, "x", 1)) + encode(Open(1, body(generate()), 1, "a-0")))
            while await wire.receive_some():
                pass

        await websocket.dial(Endpoint.read(a.at), None, 1.0, talk)
        await until(lambda: reasons(lines))
        assert a.asked == []
    assert len(reasons(lines)) == 1


@pytest.mark.parametrize("name", ["a b", "x\u00e9"])
async def test_a_name_that_no_node_has_is_refused(name: str) -> None:
    a = Node("a")
    async with linked_nodes(a):

        async def say(wire) -> None:
            pass

        with pytest.raises((PeerRefused, PeerLost, PeerViolation)):
            await handshake_as_peer(a, name, say)
            raise PeerRefused("closed")
        assert name not in a.directory.nodes


async def test_a_request_with_absurd_numbers_leaves_what_is_told_of_this_node_believable() -> None:
    a, b = Node("a", step_s=1.0), Node("b")
    async with linked_nodes(a, b):
        await all_linked(a, b)
        absurd, link = generate("absurd", tokens_max=2**62), b.link(a)

        async def say(wire) -> None:
            await wire.send_all(encode(Open(1, body(absurd), 1, "a-0")))
            await trio.sleep(0.3)
            await wire.socket.aclose()

        await handshake_as_peer(a, "x", say)
        await trio.sleep(0.2)
        assert b.link(a) is link
        await until(lambda: a.directory.running == 0)


FRAMES = st.one_of(
    st.builds(
        Open,
        st.integers(-1, 4),
        st.binary(max_size=20) | st.just(body(generate())),
        st.integers(-1, 9),
        st.sampled_from(["", "a-0", "nobody"]),
        st.none() | st.integers(-9, 10**9),
        st.integers(-1, 10),
    ),
    st.builds(Credit, st.integers(-1, 4), st.integers(-1, 2**32)),
    st.builds(Cancel, st.integers(-1, 4), st.text(max_size=5)),
    st.builds(Item, st.integers(-1, 4), st.binary(max_size=20), st.integers(-1, 9), st.integers(-1, 9)),
    st.builds(End, st.integers(-1, 4), st.binary(max_size=20)),
    st.builds(Fail, st.integers(-1, 4), st.text(max_size=5), st.text(max_size=5)),
    st.builds(RequestData, st.integers(-1, 4), st.binary(max_size=20)),
    st.builds(ReplyData, st.integers(-1, 4), st.binary(max_size=20)),
    st.builds(WindowUpdate, st.integers(-1, 2**40)),
    st.just(KeepAlive()),
    st.builds(Announce, st.binary(max_size=20) | st.just(body(NodeState((GOOD,))))),
    st.builds(Bye, st.text(max_size=5), st.text(max_size=5)),
)
SAID = st.lists(FRAMES.map(encode) | st.binary(max_size=40), max_size=6).map(b"".join)


@pytest.mark.parametrize("greeted", [True, False])
def test_no_bytes_and_no_frames_disturb_a_node(greeted: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main(said: bytes) -> None:
        a, b = Node("a", step_s=0.001), Node("b")
        async with linked_nodes(a, b):
            await all_linked(a, b)

            async def say(wire) -> None:
                await wire.send_all(said)
                await wire.socket.aclose()

            if greeted:
                await handshake_as_peer(a, "x", say)
            else:
                async with raw_connection(a, UPGRADE + said) as stream:
                    await stream.send_eof()
                    await ended(stream)
            assert await b.ask(a, tokens_max=5) == [0, 1, 2, 3, 4]
            await until(lambda: a.linked == {"b"} and a.directory.running == 0)
            assert not a.links.statistics().unauthenticated

    @settings(max_examples=25)
    @given(said=SAID)
    def any_of_them(said: bytes) -> None:
        trio.run(main, said)

    any_of_them()
    assert not [each for each in log_records(caplog) if each.exc_info]
