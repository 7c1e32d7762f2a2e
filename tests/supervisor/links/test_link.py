"""A link: many streams, one reader that never waits, one writer that is never torn."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import trio
from attrs import define, field
from trio.lowlevel import Task
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.calls import Answer, BugCounter, mailbox
from protocol import codec
from protocol.cluster import NodeState
from protocol.errors import (
    ActorLost,
    Draining,
    EngineLost,
    EngineRefused,
    InternalError,
    LinkLost,
    LocalViolation,
    NotReady,
    Overloaded,
    PeerLost,
    PeerViolation,
    TooLarge,
)
from protocol.frames import (
    VERSION,
    Announce,
    Bye,
    Credit,
    End,
    Fail,
    FrameReader,
    Hello,
    Item,
    KeepAlive,
    Open,
    Step,
    encode,
)
from protocol.kind import Kind
from protocol.messages import Done, Embedded, Finished, FlushCache, GetLoad, Started, Tokens
from protocol.peer import MESSAGE_BYTES_MAX, Peer
from protocol.tensors import Tensor
from protocol.text_messages import Text
from supervisor.links.encoding import BODY_BYTES_MAX, FREE_REPLIES_MAX
from supervisor.links.heartbeat import EARLY_S, TURN_LINKS_MAX, Heartbeat, HeartbeatTask
from supervisor.links.link import FRAMES_A_TURN, Link
from tests.rig.fake_engine import Costs, generate, whole
from tests.rig.fake_host import far_engine
from tests.system.simulator import SimTransport, counting, sim_pair, simulate


@pytest.fixture(autouse=True)
def any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let anything answer a FlushCache: what may answer which request is no matter of most of these tests."""
    monkeypatch.setitem(codec.ROWS, FlushCache, Kind(9, FlushCache, (object,), object))


@define(eq=False)
class Ends:
    """Two links, one asking and one serving, and how each of them ended."""

    asker: Link
    server: Link
    near: SimTransport
    far: SimTransport
    how: dict = field(factory=dict)

    async def carry(self, name, link: Link) -> None:
        try:
            await link.run()
        except (PeerLost, PeerViolation) as error:
            self.how[name] = (type(error), trio.current_time())


async def answering(inbox, one, bugs: BugCounter) -> None:
    async def serve(call) -> None:
        with call.answering(bugs) as replies:
            await one(call, replies)

    async with trio.open_nursery() as nursery:
        async for call in inbox:
            nursery.start_soon(serve, call)


@asynccontextmanager
async def linked(
    one, *, streams: int = 4, inbox_size: int = 4, rng=None, room: int = 65536, **fields: Heartbeat | type[EngineLost]
) -> AsyncIterator[Ends]:
    """Two ends of a link, where `one(call, replies)` answers every FlushCache."""
    near, far = sim_pair(rng, delay_s=0.01 if rng else 0, piece_max=9 if rng else 65536, room=room)
    address, inbox = mailbox(inbox_size)
    ends = Ends(
        Link(near, Peer("asker", serves_max=0), **fields),
        Link(far, Peer("server", serves_max=streams), {("", FlushCache): address}),
        near,
        far,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.carry, "asker", ends.asker)
        nursery.start_soon(ends.carry, "server", ends.server)
        nursery.start_soon(answering, inbox, one, BugCounter())
        await ends.asker.wait_ready()
        yield ends
        nursery.cancel_scope.cancel()


async def counts(call, replies) -> None:
    for number in range(3):
        await trio.sleep(1)
        replies.put(Tokens([number]))
    replies.end(Done())


async def forever(call, replies) -> None:
    await trio.sleep_forever()


async def ask(link: Link, credit: int = 9):
    async with link.ask(FlushCache(), credit) as replies:
        got = [reply async for reply in replies]
        return got, await replies.result()


def at_rest(ends: Ends) -> bool:
    for link in (ends.asker, ends.server):
        assert not link.statistics().answers
        assert not link.statistics().calls
        assert len(link.peer.asked) == len(link.peer.served) == 0
    return True


async def test_a_node_that_sends_what_only_an_engines_host_may_send_is_lost(autojump_clock: MockClock) -> None:
    async with linked(forever, heartbeat=Heartbeat()) as ends, ends.asker.ask(FlushCache(), 9):
        await trio.sleep(0.1)
        ends.server._writer.send(Step([1], [1], [-7], [], []))
        await trio.sleep(0.1)
        assert ends.how["asker"][0] is PeerViolation


# Asking across ----------------------------------------------------------------------------


async def test_asking_over_a_link_is_asking_an_actor_next_door(autojump_clock: MockClock) -> None:
    async with linked(counts) as ends:
        assert await ask(ends.asker) == ([Tokens([0]), Tokens([1]), Tokens([2])], Done())
        assert trio.current_time() == 3
        assert at_rest(ends)


async def test_an_answer_without_a_result_is_whole_all_the_same(autojump_clock: MockClock) -> None:
    async def nothing(call, replies) -> None:
        replies.end(None)

    async with linked(nothing) as ends:
        assert await ask(ends.asker) == ([], None)
        assert at_rest(ends)


async def test_an_error_crosses_as_itself(autojump_clock: MockClock) -> None:
    async def refuses(call, replies):
        raise EngineRefused("not this", param="stop")

    async with linked(refuses) as ends:
        with pytest.raises(EngineRefused, match="not this") as caught:
            await ask(ends.asker)
        assert caught.value.param == "stop"
        assert at_rest(ends)


async def test_a_bug_crosses_without_its_traceback(autojump_clock: MockClock) -> None:
    async def buggy(call, replies):
        raise KeyError("a secret")

    async with linked(buggy) as ends:
        with pytest.raises(InternalError) as caught:
            await ask(ends.asker)
        assert "secret" not in str(caught.value)


async def test_one_stream_answers_many_after_one_another(autojump_clock: MockClock) -> None:
    async with linked(counts, streams=1) as ends:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask, ends.asker)
        assert trio.current_time() == 12
        assert at_rest(ends)


async def test_an_ask_before_hello_waits_for_it(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    near, far = sim_pair()
    address, inbox = mailbox(1)
    asker = Link(near, Peer("a", serves_max=0))
    server = Link(far, Peer("b", serves_max=1), {("", FlushCache): address})
    nursery.start_soon(answering, inbox, counts, BugCounter())
    nursery.start_soon(asker.run)

    async def late() -> None:
        await trio.sleep(5)
        await server.run()

    nursery.start_soon(late)
    assert (await ask(asker))[1] == Done()
    assert trio.current_time() == 8
    nursery.cancel_scope.cancel()


async def test_an_ask_without_waiting_is_refused_where_no_stream_is_free(autojump_clock: MockClock) -> None:
    async with linked(forever, streams=2) as ends:
        for _ in range(2):
            ends.asker.open(FlushCache(), 1)
        with pytest.raises(Overloaded, match="2 streams are open"):
            ends.asker.open(FlushCache(), 1)


# Leaving ----------------------------------------------------------------------------------


def leaves_slowly(release_s: int, log=None):
    async def one(call, replies) -> None:
        try:
            replies.put(Tokens([1]))
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(release_s)
            if log is not None:
                log.append(trio.current_time())

    return one


async def test_a_streams_permit_returns_only_when_the_far_end_has_released(autojump_clock: MockClock) -> None:
    released = []
    async with linked(leaves_slowly(3, released), streams=1) as ends:
        with trio.move_on_after(1):
            await ask(ends.asker)
        assert trio.current_time() == 1
        async with ends.asker.ask(FlushCache(), 9) as replies:
            await anext(replies)
            assert trio.current_time() == 4
        assert released == [4]


async def test_an_answerer_that_never_lets_go_costs_its_stream_for_ten_seconds(autojump_clock: MockClock) -> None:
    async with linked(leaves_slowly(100), streams=1) as ends:
        with trio.move_on_after(1):
            await ask(ends.asker)
        async with ends.asker.ask(FlushCache(), 9):
            assert trio.current_time() == 11


async def test_leaving_what_nobody_has_begun_to_answer_frees_the_stream_at_once(autojump_clock: MockClock) -> None:
    near, far = sim_pair()
    address, _inbox = mailbox(4)
    asker, server = Link(near, Peer("a", serves_max=0)), Link(far, Peer("b", serves_max=1), {("", FlushCache): address})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asker.run)
        nursery.start_soon(server.run)
        await asker.wait_ready()
        with trio.move_on_after(1):
            await ask(asker)
        async with asker.ask(FlushCache(), 9):
            assert trio.current_time() == 1
        nursery.cancel_scope.cancel()


async def test_leaving_while_the_inbox_is_full_frees_the_stream_at_once(autojump_clock: MockClock) -> None:
    near, far = sim_pair()
    address, _inbox = mailbox(0)
    asker, server = Link(near, Peer("a", serves_max=0)), Link(far, Peer("b", serves_max=1), {("", FlushCache): address})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asker.run)
        nursery.start_soon(server.run)
        with trio.move_on_after(1):
            await ask(asker)
        await wait_all_tasks_blocked()
        assert len(asker.peer.asked) == server.statistics().calls == 0
        assert trio.current_time() == 1
        nursery.cancel_scope.cancel()


async def test_leaving_while_waiting_for_a_stream_takes_none(autojump_clock: MockClock) -> None:
    async with linked(counts, streams=1) as ends:
        async with ends.asker.ask(FlushCache(), 9):
            with trio.move_on_after(1):
                await ask(ends.asker)
        await trio.sleep(1)
        assert at_rest(ends)
        assert ends.asker.peer.asked.last == 1


async def test_a_stream_that_the_one_who_was_woken_for_it_cannot_use_goes_to_the_next(
    autojump_clock: MockClock,
) -> None:
    async with linked(counts, streams=1) as ends:
        failed = []

        async def too_large() -> None:
            with pytest.raises(TooLarge):
                async with ends.asker.ask(generate(prompt=BODY_BYTES_MAX), 1):
                    pass
            failed.append(trio.current_time())

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for asks in (partial(ask, ends.asker), too_large, too_large, partial(ask, ends.asker)):
                    nursery.start_soon(asks)
                    await wait_all_tasks_blocked()
        assert (failed, trio.current_time()) == ([3, 3], 6)
        assert at_rest(ends)


async def test_leaving_after_the_end_says_nothing(autojump_clock: MockClock) -> None:
    async with linked(counts) as ends:
        async with ends.asker.ask(FlushCache(), 9) as replies:
            await trio.sleep(5)
            queued = ends.asker.peer.queued_bytes
        assert replies.over.is_set()
        assert ends.asker.peer.queued_bytes == queued == 0
        ends.asker.cancel(1)


async def test_replies_that_cross_a_cancel_are_dropped(autojump_clock: MockClock) -> None:
    async def busy(call, replies) -> None:
        for number in range(100):
            replies.put(Tokens([number]))
            await trio.sleep(0.001)

    async def scenario(rng) -> None:
        async with linked(busy, rng=rng) as ends:
            for _ in range(5):
                async with ends.asker.ask(FlushCache(), 100) as replies:
                    await anext(replies)
            await trio.sleep(20)
            assert at_rest(ends)
            assert ends.how == {}

    for seed in range(5):
        await trio.to_thread.run_sync(simulate, scenario, seed)


# A link that ends -------------------------------------------------------------------------


async def test_a_cut_fails_whoever_asked_and_cancels_whoever_answers(autojump_clock: MockClock) -> None:
    released = []
    async with linked(leaves_slowly(2, released), lost_error=EngineLost) as ends, trio.open_nursery() as nursery:

        async def cut() -> None:
            await trio.sleep(1)
            ends.near.cut()

        nursery.start_soon(cut)
        with pytest.raises(EngineLost):
            await ask(ends.asker)
        assert trio.current_time() == 1
        with pytest.raises(EngineLost):
            await ask(ends.asker)
        with pytest.raises(EngineLost):
            ends.asker.open(FlushCache(), 1)
        await trio.sleep(5)
        assert released == [3]
        assert ends.how == {"asker": (PeerLost, 1), "server": (PeerLost, 1)}
        assert not ends.server.statistics().calls


async def test_a_cut_fails_those_who_wait_for_a_stream(autojump_clock: MockClock) -> None:
    async with linked(forever, streams=1) as ends:
        async with trio.open_nursery() as nursery:
            times = []

            async def one() -> None:
                with pytest.raises(LinkLost):
                    await ask(ends.asker)
                times.append(trio.current_time())

            for _ in range(3):
                nursery.start_soon(one)
            await trio.sleep(1)
            ends.far.cut()
        assert times == [1, 1, 1]


async def test_askers_hear_of_the_end_before_answerers_have_let_go(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    near, far = sim_pair()
    address, inbox = mailbox(1)
    both = [Link(end, Peer("x", serves_max=4), {("", FlushCache): address}) for end in (near, far)]
    nursery.start_soon(answering, inbox, leaves_slowly(8), BugCounter())
    ends = Ends(both[0], both[1], near, far)
    nursery.start_soon(ends.carry, "near", both[0])
    nursery.start_soon(ends.carry, "far", both[1])
    await both[0].wait_ready()
    await both[1].wait_ready()

    async def leaver() -> None:
        with trio.move_on_after(1):
            await ask(both[1])

    nursery.start_soon(leaver)

    async def cut() -> None:
        await trio.sleep(2)
        near.cut()

    nursery.start_soon(cut)
    with pytest.raises(LinkLost):
        await ask(both[0])
    assert trio.current_time() == 2
    nursery.cancel_scope.cancel()


async def test_cancelling_a_link_fails_its_askers_at_once(autojump_clock: MockClock) -> None:
    near, _far = sim_pair()
    far_peer = Peer("far", serves_max=1)
    link = Link(near, Peer("near", serves_max=0))
    async with trio.open_nursery() as nursery:
        carrying = trio.CancelScope()

        async def carry() -> None:
            with carrying:
                await link.run()

        nursery.start_soon(carry)
        await _far.send_all(far_peer.data_to_send())
        await link.wait_ready()
        _, answer = link.open(FlushCache(), 1)
        carrying.cancel()
        with pytest.raises(LinkLost):
            await answer.result()


async def test_a_bye_says_why(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    near, far = sim_pair()
    link = Link(near, Peer("a", serves_max=0))
    other = Peer("b", serves_max=0)
    async with trio.open_nursery() as inner:

        async def carry() -> None:
            with pytest.raises(PeerLost, match="shutdown: the node stops it"):
                await link.run()

        inner.start_soon(carry)
        await far.send_all(other.data_to_send())
        await link.wait_ready()
        other.send(Bye("shutdown", "the node stops it"))
        await far.send_all(other.data_to_send())
        far.close()
    assert link.received_bye.detail == "the node stops it"


async def test_a_bye_has_no_say_in_what_else_the_log_says(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    near, far = sim_pair(room=4_000_000)
    link, other = Link(near, Peer("a", serves_max=0)), Peer("b", serves_max=0)
    other.send(Bye("x", "gone\n12:00:00 error: all is lost \x1b[2J" + 1_000_000 * "!"))
    await far.send_all(other.data_to_send())
    far.close()
    with pytest.raises(PeerLost) as caught:
        await link.run()
    assert str(caught.value).startswith("x: gone\\n12:00:00 error: all is lost \\x1b[2J!")
    assert len(str(caught.value)) < 3000


async def test_a_node_that_shuts_down_fails_whoever_asked_at_once_and_truthfully(autojump_clock: MockClock) -> None:
    async with linked(forever) as ends, ends.asker.ask(FlushCache(), 9) as replies:
        await trio.sleep(1)
        ends.server.send_bye("draining", "node b shuts down")
        with pytest.raises(Draining, match="node b shuts down"):
            await replies.result()
        assert trio.current_time() == 1
        assert ends.how == {}  # the link is there for the last words


# A peer that lies or sleeps ---------------------------------------------------------------


@asynccontextmanager
async def facing(**fields):
    """A link with a hand-written other end."""
    near, far = sim_pair(room=4096)
    link = Link(near, Peer("here", serves_max=2), **fields)
    async with trio.open_nursery() as nursery:
        ended = []

        async def carry() -> None:
            try:
                await link.run()
            except (PeerLost, PeerViolation, LocalViolation) as error:
                ended.append(error)

        nursery.start_soon(carry)
        await far.send_all(encode(Hello(VERSION, "there", 8)))
        await link.wait_ready()
        yield link, far, ended
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "lie",
    [
        encode(Item(1, codec.encode(Text("x", 1)), 99)),
        encode(Item(1, b"", 1)),
        encode(Item(1, b"\xff", 1)),
        encode(End(1, b"\x01\xc1")),
        encode(End(2, b"")),
        encode(Credit(1, 1)),
        encode(Open(1, codec.encode(GetLoad()), 1)),
        encode(Open(1, b"", 1)),
        encode(Hello(VERSION, "again", 1)),
        b"\xff" * 5,
    ],
    ids=repr,
)
async def test_a_lie_ends_the_link_and_fails_its_askers(lie: bytes, autojump_clock: MockClock) -> None:
    async with facing() as (link, far, ended):
        _, answer = link.open(FlushCache(), 5)
        await far.send_all(lie)
        with trio.fail_after(1), pytest.raises(LinkLost):
            await answer.result()
        await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [PeerViolation]


def bugs_logged(caplog: pytest.LogCaptureFixture):
    return [each for each in caplog.records if each.message == "a bug of this node ended a link"]


async def test_a_frame_of_this_end_that_breaks_the_rules_ends_the_link_as_a_bug_of_this_node(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    address, inbox = mailbox(1)
    async with facing(services={("", FlushCache): address}) as (link, far, ended):
        await far.send_all(encode(Open(1, codec.encode(FlushCache()), 1)))
        call = await inbox.receive()
        link.peer.served.step(End(1, b""))  # closed for the protocol, which the call that is served does not know
        call.answer.put(Tokens([1]))
        await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [LocalViolation]
        assert "Item on stream 1, which is closed" in str(link.ended)
        (record,) = bugs_logged(caplog)
        assert (record.levelname, record.exc_info[1]) == ("ERROR", link.ended)
        frames = list(FrameReader().feed(bytes(await far.receive_some())))
        assert [type(frame) for frame in frames] == [Hello], "the other end is told of no fault"


async def test_an_asker_whose_frame_breaks_the_rules_gets_the_error_of_a_lost_link(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with facing() as (link, _, ended):
        _, first = link.open(FlushCache(), 1)
        _, second = link.open(FlushCache(), -1)
        for answer in (first, second):
            with pytest.raises(LinkLost):
                await answer.result()
        await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [LocalViolation]
        assert len(bugs_logged(caplog)) == 1


async def test_a_peer_that_does_not_read_ends_the_link_and_no_bystander(autojump_clock: MockClock) -> None:
    async with facing(queued_bytes_max=20_000) as (link, _, ended):
        answers = []
        with pytest.raises(LinkLost):
            for number in range(8):
                answers.append(link.open(generate(str(number), prompt=4000), 1)[1])
                await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [PeerViolation]
        assert "unread" in str(ended[0])
        for answer in answers:
            with pytest.raises(LinkLost):
                await answer.result()


async def test_credit_that_comes_before_the_answerer_was_asked_is_not_lost(autojump_clock: MockClock) -> None:
    address, inbox = mailbox(0)
    async with facing(services={("", FlushCache): address}) as (_, far, _ended):
        await far.send_all(encode(Open(1, codec.encode(FlushCache()), 1)))
        await wait_all_tasks_blocked()  # it waits: the inbox has no room
        await far.send_all(encode(Credit(1, 5)))
        await wait_all_tasks_blocked()
        call = await inbox.receive()
        await wait_all_tasks_blocked()
        assert call.answer.credit == 6
        await far.send_all(encode(Credit(1, 2)))
        await wait_all_tasks_blocked()
        assert call.answer.credit == 8


async def test_b18_left_reaches_nobody_who_stayed(autojump_clock: MockClock) -> None:
    async with facing() as (link, far, _):
        _, answer = link.open(FlushCache(), 5)
        await far.send_all(encode(Fail(1, "left", "x")))
        with pytest.raises(ActorLost):
            await answer.result()


async def test_an_unknown_code_arrives_as_internal(autojump_clock: MockClock) -> None:
    async with facing() as (link, far, _):
        _, answer = link.open(FlushCache(), 5)
        await far.send_all(encode(Fail(1, "from_the_future", "x")))
        with pytest.raises(InternalError):
            await answer.result()


# Nobody waits for anybody -----------------------------------------------------------------


async def test_a_slow_reader_does_not_delay_others(autojump_clock: MockClock) -> None:
    async with far_engine(Costs(step_s=1)) as far:
        unread = far.engine.submit(generate("slow", tokens_max=200))
        fast = generate("fast", tokens_max=5)
        answer = far.engine.submit(fast)
        await answer.over.wait()
        assert trio.current_time() == 5
        assert unread.credit == 195


async def test_a_step_wakes_only_the_reader_of_the_link(autojump_clock: MockClock) -> None:
    async with far_engine(Costs(slots=32, waiting_max=32, step_s=1)) as far, trio.open_nursery() as nursery:
        sinks = [Answer(50) for _ in range(32)]
        for number, sink in enumerate(sinks):
            wanted = generate(str(number), tokens_max=50)
            answer = far.engine.submit(wanted)

            async def relay(answer: Answer[Started | Tokens, Finished] = answer, sink=sink) -> None:
                await answer.relay(lambda reply: sink.put(reply, len(reply.ids) if isinstance(reply, Tokens) else 0))

            nursery.start_soon(relay, name="relay")
        await trio.sleep(1.5)
        with counting() as steps:
            await trio.sleep(10)
        assert all(sink.credit == 50 - 11 for sink in sinks)
        assert "relay" not in steps.by_name
        assert steps.by_name["link"] <= 2 * 10 + 2


async def test_a_writer_sends_all_that_is_queued_as_one_message(autojump_clock: MockClock) -> None:
    sent = []

    class Recording(SimTransport):
        async def send_all(self, data: bytes) -> None:
            sent.append(data)
            await super().send_all(data)

    near, far = sim_pair()
    link = Link(Recording(near._into, near._out), Peer("a", serves_max=0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        await far.send_all(encode(Hello(VERSION, "there", 8)))
        await link.wait_ready()
        for _ in range(5):
            link.open(FlushCache(), 1)
        await wait_all_tasks_blocked()
        assert len(list(FrameReader().feed(sent[-1]))) == 5
        assert len(sent) == 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(4))
def test_every_stream_is_whole_over_a_bad_network(seed: int) -> None:
    async def scenario(rng: random.Random) -> None:
        async with far_engine(Costs(step_s=0.01), rng, 0.02, piece_max=rng.choice((1, 9)), room=200) as far:
            for number in range(12):
                wanted = generate(str(number), tokens_max=rng.randint(1, 20))
                answer = far.engine.submit(wanted)
                ids = [token for reply in [each async for each in answer][1:] for token in reply.ids]
                assert (ids, await answer.result()) == whole(wanted)

    simulate(scenario, seed)


# Hearts -----------------------------------------------------------------------------------

HEART = Heartbeat(heartbeat_s=1.0, silent_s=3.0)


async def test_c1_what_has_piled_up_in_one_message_is_heard_in_many_turns(autojump_clock: MockClock) -> None:
    turns, heard = [], []

    async def speak(call, replies) -> None:
        for number in range(1000):
            replies.put(Tokens([number]))
        replies.end(Done())

    async def count() -> None:
        while True:
            turns.append(len(heard))
            await trio.lowlevel.checkpoint()

    async with linked(speak) as ends, trio.open_nursery() as nursery:
        nursery.start_soon(count)
        async with ends.asker.ask(FlushCache(), 1000) as replies:
            assert await replies.relay(heard.append) == Done()
        nursery.cancel_scope.cancel()
    assert heard == [Tokens([number]) for number in range(1000)]
    # The counter may come first in one pass of the loop, and last in the next.
    assert max(after - before for before, after in pairwise(turns)) <= 2 * FRAMES_A_TURN


def kinds(data):
    return [type(frame).__name__ for frame in FrameReader().feed(data)]


async def test_a_beat_is_sent_for_every_second_in_which_nothing_else_was(autojump_clock: MockClock) -> None:
    async with facing(heartbeat=HEART) as (link, far, _):
        assert kinds(await far.receive_some()) == ["Hello"]
        heard = []
        async with trio.open_nursery() as nursery:

            async def speak() -> None:
                for _ in range(8):
                    await trio.sleep(0.9)
                    await far.send_all(encode(KeepAlive()))

            async def listen() -> None:
                while True:
                    frames = kinds(await far.receive_some())
                    heard.append((round(trio.current_time(), 2), *frames))

            nursery.start_soon(speak)
            nursery.start_soon(listen)
            await trio.sleep(2.5)
            for _ in range(4):
                link.open(FlushCache(), 1)
                await trio.sleep(0.5)
            await trio.sleep(1.2)
            nursery.cancel_scope.cancel()
        assert heard == [
            (1.0, "KeepAlive"),
            (2.0, "KeepAlive"),
            *((at, "Open") for at in (2.5, 3.0, 3.5, 4.0)),
            (5.0, "KeepAlive"),
        ]


async def test_a_bug_in_one_link_ends_that_one_and_no_other(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy:
        """A link whose heartbeat fails."""

        reason = None

        def beat(self, due_at, now):
            raise ZeroDivisionError

        def abort(self, reason) -> None:
            self.reason = reason

    hearts, buggy = HeartbeatTask(), Buggy()
    hearts.add(buggy, 0.5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hearts.run)
        async with facing(heartbeat=HEART, heartbeat_task=hearts) as (link, far, _):
            assert kinds(await far.receive_some()) == ["Hello"]
            assert kinds(await far.receive_some()) == ["KeepAlive"]
            assert not link.lost
        nursery.cancel_scope.cancel()
    assert isinstance(buggy.reason, LocalViolation)
    assert [record.message for record in caplog.records if record.exc_info] == ["a bug ended a link"]


async def test_thousands_of_links_are_tended_a_few_at_a_time(autojump_clock: MockClock) -> None:
    class Steps(trio.abc.Instrument):
        """Counts the steps of all tasks."""

        count = 0

        def before_task_step(self, task: Task) -> None:
            self.count += 1

    class Idle:
        """A link that is to beat once a second."""

        def beat(self, due_at, now):
            tended[steps.count].append(now)
            return due_at + 1

        def abort(self, reason):
            raise reason

    hearts, tended, steps = HeartbeatTask(), defaultdict(list), Steps()
    for _ in range(10 * TURN_LINKS_MAX):
        hearts.add(Idle(), 1.0)
    trio.lowlevel.add_instrument(steps)
    with trio.move_on_after(2.5):
        await hearts.run()
    trio.lowlevel.remove_instrument(steps)
    assert [len(at) for at in tended.values()] == [TURN_LINKS_MAX] * 20
    assert all(2 - EARLY_S - 0.01 <= at <= 2.01 for at in list(tended.values())[-1])


async def test_a_peer_that_stops_is_lost_after_its_silence_and_not_before(autojump_clock: MockClock) -> None:
    async with facing(heartbeat=HEART) as (link, far, ended):
        _, answer = link.open(FlushCache(), 1)
        for _ in range(4):
            await trio.sleep(2.9)
            await far.send_all(encode(KeepAlive()))
        await trio.sleep(2.99)
        assert (link.lost, ended) == (False, [])
        with pytest.raises(LinkLost):
            await answer.result()
        assert trio.current_time() == pytest.approx(4 * 2.9 + 3.0)
        await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [PeerLost]
        assert str(ended[0]) == "the other end has been silent for 3 s"
        assert link.received_bye is None


async def test_a_peer_that_never_says_hello_is_lost_too(autojump_clock: MockClock) -> None:
    near, _far = sim_pair()
    with pytest.raises(PeerLost, match="silent for 3 s"):
        await Link(near, Peer("here", serves_max=0), heartbeat=HEART).run()
    assert trio.current_time() == 3


async def test_two_lively_ends_with_nothing_to_say_keep_each_other_until_the_line_is_half_open(
    autojump_clock: MockClock,
) -> None:
    near, far = sim_pair()
    links = [Link(end, Peer("x", serves_max=1), heartbeat=HEART) for end in (near, far)]
    lost = []

    async def carry(link: Link) -> None:
        with pytest.raises(PeerLost, match="silent"):
            await link.run()
        lost.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for link in links:
            nursery.start_soon(carry, link)
        await trio.sleep(1000.5)
        assert not any(link.lost for link in links)
        assert all(990 <= link.traffic.messages_sent <= 1010 for link in links)
        near.swallow()  # neither end hears of it
    assert lost == [pytest.approx(1003), pytest.approx(1003)]


@pytest.mark.parametrize("stood_still_s", [3.05, 3.2, 50])  # the first is over a moment after the silence
async def test_an_end_that_stood_still_itself_hears_the_other_before_it_judges(
    stood_still_s: float, mock_clock: MockClock
) -> None:
    async with facing(heartbeat=HEART) as (link, far, ended):
        mock_clock.jump(stood_still_s)  # all tasks of this process slept, say for a debugger
        await wait_all_tasks_blocked()
        assert not link.lost
        await far.send_all(encode(KeepAlive()))
        await wait_all_tasks_blocked()
        mock_clock.jump(1.5)
        await wait_all_tasks_blocked()
        assert (link.lost, ended) == (False, [])
        for _ in range(40):
            mock_clock.jump(0.08)
            await wait_all_tasks_blocked()
        assert link.lost


# Deadlines --------------------------------------------------------------------------------


async def test_a_deadline_ends_the_answer_at_the_far_end_though_no_cancel_comes(autojump_clock: MockClock) -> None:
    released = []
    async with linked(leaves_slowly(0, released)) as ends:
        with trio.move_on_after(2):
            async with ends.asker.ask(FlushCache(), 9) as replies:
                await anext(replies)
                ends.near.swallow()
                await trio.sleep_forever()
        await trio.sleep(5)
        assert released == [2]
        assert not ends.server.statistics().calls


async def test_a_request_that_came_too_late_fails_as_deadline_exceeded(autojump_clock: MockClock) -> None:
    address, inbox = mailbox(4)
    async with facing(services={("", FlushCache): address}) as (_, far, _ended), trio.open_nursery() as nursery:
        nursery.start_soon(answering, inbox, forever, BugCounter())
        await far.receive_some()
        for stream, within_ms in ((1, 0), (2, -5)):
            await far.send_all(encode(Open(stream, codec.encode(FlushCache()), 1, "", within_ms)))
        await wait_all_tasks_blocked()
        frames = list(FrameReader().feed(await far.receive_some()))
        assert {(type(frame), frame.stream, frame.code) for frame in frames} == {
            (Fail, 1, "deadline_exceeded"),
            (Fail, 2, "deadline_exceeded"),
        }
        await far.send_all(encode(Open(3, codec.encode(FlushCache()), 1, "", 1500)))
        frames = list(FrameReader().feed(await far.receive_some()))
        assert trio.current_time() == 1.5
        assert frames[0].code == "deadline_exceeded"
        nursery.cancel_scope.cancel()


async def test_a_deadline_crosses_two_links_as_what_is_left_of_it(autojump_clock: MockClock) -> None:
    released = []
    async with linked(leaves_slowly(0, released)) as second:
        near, far = sim_pair()
        first = Link(near, Peer("a", serves_max=0))
        middle = Link(far, Peer("b", serves_max=4), {("worker", FlushCache): second.asker})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run)
            nursery.start_soon(middle.run)
            await first.wait_ready()
            with trio.move_on_after(7.5):
                async with first.ask(FlushCache(), 1, "worker") as replies:
                    await anext(replies)
                    near.swallow()  # no word of the asker's leaving comes across, on neither link
                    second.near.swallow()
                    await replies.result()
            assert released == []
            await trio.sleep(0.01)
            assert released == [pytest.approx(7.5)]
            assert not second.server.statistics().calls
            nursery.cancel_scope.cancel()


async def test_an_asker_who_has_left_already_asks_without_a_bug(autojump_clock: MockClock) -> None:
    async with facing() as (link, far, _):
        await far.receive_some()
        with trio.CancelScope() as scope:  # noqa: ASYNC100  # no time passes here: it is cancelled
            scope.cancel()
            link.open(FlushCache(), 1)
        (asked,) = FrameReader().feed(await far.receive_some())
        assert asked.within_ms == 0


# Whom to ask, and what to tell ------------------------------------------------------------


async def test_to_ask_somebody_unknown_is_not_ready_and_no_violation(autojump_clock: MockClock) -> None:
    async with linked(counts) as ends:
        for _ in range(5):
            with pytest.raises(NotReady, match="there is no oak here"):
                async with ends.asker.ask(FlushCache(), 9, "oak") as replies:
                    await replies.result()
        assert (await ask(ends.asker))[1] == Done()
        assert at_rest(ends)


async def test_tensors_cross_whole_beside_streams_of_tokens(autojump_clock: MockClock) -> None:
    sizes = (600_000, 0, 17)
    tensors = tuple(Tensor("uint8", (size,), memoryview(bytes([at]) * size)) for at, size in enumerate(sizes))

    async def one(call, replies) -> None:
        if not beside:
            beside.append(True)
            replies.put(Embedded(tensors))
            replies.end(Done())
        else:
            for number in range(200):
                await trio.sleep(0.001)
                replies.put(Tokens([number]))
            replies.end(Done())

    beside = []
    got: dict[Any, list[Any]] = {}

    async def read(name) -> None:
        async with ends.asker.ask(FlushCache(), 300) as replies:
            got[name] = [reply async for reply in replies]

    async with linked(one, rng=random.Random(3), room=10_000) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, "tensors")
            await wait_all_tasks_blocked()
            for number in range(3):
                nursery.start_soon(read, number)
        assert at_rest(ends)
    assert [(tensor.shape, bytes(tensor.data)) for tensor in got["tensors"][0].tensors] == [
        (tensor.shape, bytes(tensor.data)) for tensor in tensors
    ]
    assert all(got[number] == [Tokens([each]) for each in range(200)] for number in range(3))


async def test_what_is_told_is_heard_where_somebody_listens_and_a_violation_elsewhere(
    autojump_clock: MockClock,
) -> None:
    heard = []
    state = NodeState(draining=True)
    async with facing(on_announcement=heard.append) as (link, far, ended):
        link.announce(state)
        await far.send_all(encode(Announce(codec.encode(state))))
        await wait_all_tasks_blocked()
        assert (heard, ended) == ([state], [])
        assert encode(Announce(codec.encode(state))) in bytes(await far.receive_some())
    async with facing() as (_, far, ended):
        await far.send_all(encode(Announce(codec.encode(state))))
        await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [PeerViolation]
        assert "NodeState was announced" in str(ended[0])


# What may answer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        Item(1, codec.encode(Text("x", 1)), 1),
        Item(1, codec.encode(Tokens([1, 2, 3])), 1),
        Item(1, codec.encode(Tokens([1])), 0),
        End(1, b""),
        End(1, codec.encode(Done())),
    ],
    ids=repr,
)
async def test_an_answer_of_another_kind_ends_the_link(lie: Item | End, autojump_clock: MockClock) -> None:
    async with facing() as (link, far, ended):
        _, answer = link.open(generate(), 5)
        await far.send_all(encode(lie))
        with pytest.raises(LinkLost):
            await answer.result()
        await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [PeerViolation]


async def test_a_load_is_answered_with_a_load_or_not_at_all(autojump_clock: MockClock) -> None:
    async with facing() as (link, far, ended):
        _, answer = link.open(GetLoad(), 0)
        await far.send_all(encode(End(1, codec.encode(Done()))))
        with pytest.raises(LinkLost):
            await answer.result()
        await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [PeerViolation]


async def test_replies_that_cost_nothing_do_not_come_without_end(autojump_clock: MockClock) -> None:
    async with facing() as (link, far, ended):
        _, _answer = link.open(generate(), 5)
        for _ in range(FREE_REPLIES_MAX + 1):
            await far.send_all(encode(Item(1, codec.encode(Started()), 0)))
        await wait_all_tasks_blocked()
        assert [type(error) for error in ended] == [PeerViolation]


async def test_a_request_that_fits_no_frame_fails_alone(autojump_clock: MockClock) -> None:
    async with linked(counts) as ends:
        with pytest.raises(TooLarge):
            ends.asker.open(generate(prompt=BODY_BYTES_MAX), 1)
        assert (await ask(ends.asker))[1] == Done()
        assert at_rest(ends)


async def test_a_message_is_no_longer_than_it_may_be_and_a_long_frame_comes_whole(autojump_clock: MockClock) -> None:
    sizes = []

    class Measuring(SimTransport):
        async def send_all(self, data: bytes) -> None:
            sizes.append(len(data))
            await super().send_all(data)

    near, far = sim_pair(room=2**20)
    link = Link(Measuring(near._into, near._out), Peer("a", serves_max=0))
    reader = FrameReader()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        await far.send_all(encode(Hello(VERSION, "there", 8)))
        await link.wait_ready()
        asked = [generate(str(number), prompt=1_500_000 + number) for number in range(3)]
        for each in asked:
            link.open(each, 1)
        got = []
        while len(got) < 4:
            got += reader.feed(await far.receive_some())
        nursery.cancel_scope.cancel()
    assert [codec.decode(frame.body) for frame in got[1:]] == asked
    assert max(sizes) == MESSAGE_BYTES_MAX
    assert len(sizes) >= 5
    assert link.peer.queued_bytes == 0
