"""A link: many streams at once, a reader that waits for nobody, and one end for all."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import (
    Draining,
    EngineLost,
    EngineRefused,
    InternalError,
    LinkLost,
    LocalViolation,
    PeerLost,
    PeerViolation,
)
from protocol.link import codec
from protocol.link.frames import (
    Announce,
    Bye,
    End,
    Ended,
    Frame,
    Item,
    Open,
    Step,
)
from protocol.link.peer import Peer
from protocol.messages.cluster import NodeState
from protocol.messages.engine import Done, GetLoad
from protocol.messages.generation import Finished, FinishReason, Started, Tokens, Usage
from protocol.messages.kind import Message
from protocol.messages.operations import FlushCache, RankStarted, RunRank
from protocol.messages.text import Text
from supervisor.links.encoding import FREE_REPLIES_MAX
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import FRAMES_A_TURN, Link
from tests.rig.calls import AnyAnswer, AnyCall, mailbox
from tests.rig.fake_engine import Costs, generate, whole
from tests.rig.fake_host import far_engine
from tests.rig.links import (
    any_answer,
    ask,
    bugs_logged,
    count_to_three,
    hand_written,
    held_for,
    linked,
    never_answer,
    serve,
)
from tests.rig.network import sim_pair
from tests.system.simulator import counting, simulate

# Answers ----------------------------------------------------------------------------------


async def test_a_request_over_a_link_is_answered_as_by_an_actor_of_this_process(autojump_clock: MockClock) -> None:
    async with linked(count_to_three) as ends:
        assert await ask(ends.asker) == ([Tokens((0,)), Tokens((1,)), Tokens((2,))], Done())
        assert trio.current_time() == 3
        ends.check_at_rest()


async def test_a_request_before_hello_waits_for_it(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    near, far = sim_pair()
    address, inbox = mailbox(1)
    asker = Link(near, Peer("a", serves_max=0))
    nursery.start_soon(serve, inbox, count_to_three)
    nursery.start_soon(asker.run)

    async def serve_late() -> None:
        await trio.sleep(5)
        await Link(far, Peer("b", serves_max=1), {("", FlushCache): address}).run()

    nursery.start_soon(serve_late)
    with any_answer(), trio.fail_after(20):
        assert (await ask(asker))[1] == Done()
    assert trio.current_time() == 8


async def test_an_answer_without_a_result_is_complete(autojump_clock: MockClock) -> None:
    async def end(call: AnyCall, replies: AnyAnswer) -> None:
        replies.end(None)

    async with linked(end) as ends:
        assert await ask(ends.asker) == ([], None)
        ends.check_at_rest()


async def test_an_error_of_a_request_crosses_and_of_a_bug_nothing_but_that_it_is_one(autojump_clock: MockClock) -> None:
    errors = iter((EngineRefused("not this", param="stop"), KeyError("a secret")))

    async def fail(call: AnyCall, replies: AnyAnswer) -> None:
        raise next(errors)

    async with linked(fail) as ends:
        with pytest.raises(EngineRefused, match="not this") as refused:
            await ask(ends.asker)
        assert refused.value.param == "stop"
        with pytest.raises(InternalError) as bug:
            await ask(ends.asker)
        assert "secret" not in str(bug.value)
        ends.check_at_rest()


async def test_an_announcement_reaches_an_end_that_takes_them_and_is_a_violation_elsewhere(
    autojump_clock: MockClock,
) -> None:
    received: list[Message] = []
    state = NodeState(draining=True)
    announce = Announce(codec.encode(state))
    async with hand_written(on_announcement=received.append) as other:
        other.link.announce(state)
        await other.send(announce)
        assert (received, other.ended) == ([state], None)
        assert await other.receive() == [announce]
    async with hand_written() as other:
        await other.send(announce)
        assert isinstance(other.ended, PeerViolation)
        assert "NodeState was announced" in str(other.ended)


# Nobody waits for anybody -----------------------------------------------------------------


async def test_a_slow_reader_does_not_delay_others(autojump_clock: MockClock) -> None:
    async with far_engine(Costs(step_s=1)) as far:
        unread = far.engine.submit(generate("slow", tokens_max=200))
        answer = far.engine.submit(generate("fast", tokens_max=5))
        await answer.over.wait()
        assert trio.current_time() == 5
        assert unread.credit == 195


async def test_a_step_wakes_only_the_reader_of_the_link(autojump_clock: MockClock) -> None:
    async with far_engine(Costs(slots=32, waiting_max=32, step_s=1)) as far, trio.open_nursery() as nursery:
        sinks: list[AnyAnswer] = [AnyAnswer(50) for _ in range(32)]
        for number, sink in enumerate(sinks):
            answer = far.engine.submit(generate(str(number), tokens_max=50))

            async def relay(answer: AnyAnswer = answer, sink: AnyAnswer = sink) -> None:
                await answer.relay(lambda reply: sink.put(reply, len(reply.ids) if isinstance(reply, Tokens) else 0))

            nursery.start_soon(relay, name="relay")
        await trio.sleep(1.5)
        with counting() as steps:
            await trio.sleep(10)
        assert all(sink.credit == 50 - 11 for sink in sinks)
        assert "relay" not in steps.by_name
        assert steps.by_name["link"] <= 2 * 10 + 2


async def test_a_message_of_many_frames_is_handled_in_many_turns(autojump_clock: MockClock) -> None:
    counts: list[int] = []
    received: list[Message] = []

    async def reply_at_once(call: AnyCall, replies: AnyAnswer) -> None:
        for number in range(1000):
            replies.put(Tokens((number,)))
        replies.end(Done())

    async def count() -> None:
        while True:
            counts.append(len(received))
            await trio.lowlevel.checkpoint()

    async with linked(reply_at_once) as ends, trio.open_nursery() as nursery:
        nursery.start_soon(count)
        async with ends.asker.ask(FlushCache(), 1000) as replies:
            assert await replies.relay(received.append) == Done()
        nursery.cancel_scope.cancel()
    assert received == [Tokens((number,)) for number in range(1000)]
    # The counter may come first in one pass of the loop, and last in the next.
    assert max(after - before for before, after in pairwise(counts)) <= 2 * FRAMES_A_TURN


@pytest.mark.parametrize("seed", range(4))
def test_every_stream_is_whole_over_a_bad_network(seed: int) -> None:
    async def scenario(rng: random.Random) -> None:
        async with far_engine(Costs(step_s=0.01), rng, 0.02, piece_max=rng.choice((1, 9)), room=200) as far:
            for number in range(12):
                request = generate(str(number), tokens_max=rng.randint(1, 20))
                answer = far.engine.submit(request)
                started, *replies = [reply async for reply in answer]
                assert isinstance(started, Started)
                ids = [token for reply in replies if isinstance(reply, Tokens) for token in reply.ids]
                assert (ids, await answer.result()) == whole(request)

    simulate(scenario, seed)


# The end of a link ------------------------------------------------------------------------


async def test_a_cut_fails_all_askers_and_cancels_the_calls_that_are_served(autojump_clock: MockClock) -> None:
    released: list[float] = []
    async with linked(held_for(2, released), lost_error=EngineLost) as ends:
        _, answer = ends.asker.open(FlushCache(), 9)
        await trio.sleep(1)
        ends.near.cut()
        with pytest.raises(EngineLost):
            await answer.result()
        assert trio.current_time() == 1
        with pytest.raises(EngineLost):
            await ask(ends.asker)
        with pytest.raises(EngineLost):
            ends.asker.open(FlushCache(), 1)
        await trio.sleep(5)
        assert released == [3]
        assert ends.ended == dict.fromkeys(("asker", "server"), ("the other end closed the link", 1))
        assert not ends.server.statistics().calls


async def test_a_cut_fails_those_that_wait_for_a_stream(autojump_clock: MockClock) -> None:
    failed: list[float] = []

    async def wait() -> None:
        with pytest.raises(LinkLost):
            await ask(ends.asker)
        failed.append(trio.current_time())

    async with linked(never_answer, streams=1) as ends, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        await trio.sleep(1)
        ends.far.cut()
    assert failed == [1, 1, 1]


async def test_askers_fail_before_the_calls_that_are_served_have_released_what_they_hold(
    autojump_clock: MockClock,
) -> None:
    async with linked(held_for(8)) as ends:
        _, answer = ends.asker.open(FlushCache(), 9)
        with trio.move_on_after(1):
            await ask(ends.server)
        await trio.sleep(1)
        ends.near.cut()
        with pytest.raises(LinkLost):
            await answer.result()
        assert trio.current_time() == 2
        assert ends.asker.statistics().calls == 1


async def test_a_link_that_is_cancelled_fails_its_askers_at_once(autojump_clock: MockClock) -> None:
    async with hand_written() as other:
        _, answer = other.link.open(FlushCache(), 1)
        other.scope.cancel()
        with pytest.raises(LinkLost):
            await answer.result()


@pytest.mark.parametrize(
    ("bye", "reason"),
    [
        (Bye("shutdown", "the node stops it"), "shutdown: the node stops it"),
        (
            Bye("x", "gone\n12:00:00 error: all is lost \x1b[2J" + 1_000_000 * "!"),
            "x: gone\\n12:00:00 error: all is lost \\x1b[2J!",
        ),
    ],
    ids=["plain", "controls"],
)
async def test_the_reason_of_a_bye_is_the_links_and_is_printable_and_short(
    bye: Bye, reason: str, autojump_clock: MockClock
) -> None:
    async with hand_written(room=4_000_000) as other:
        await other.send(bye)
        other.far.close()
        await wait_all_tasks_blocked()
        assert isinstance(other.ended, PeerLost)
        assert str(other.ended).startswith(reason)
        assert len(str(other.ended)) < 3000
        assert other.link.received_bye == bye


async def test_a_node_that_drains_fails_what_it_was_asked_at_once_and_keeps_the_link(autojump_clock: MockClock) -> None:
    async with linked(never_answer) as ends, ends.asker.ask(FlushCache(), 9) as replies:
        await trio.sleep(1)
        ends.server.send_bye("draining", "node b shuts down")
        with pytest.raises(Draining, match="node b shuts down"):
            await replies.result()
        assert trio.current_time() == 1
        assert ends.ended == {}


# Violations -------------------------------------------------------------------------------

STARTED = Item(1, codec.encode(Started()), 0)
END = End(1, codec.encode(Finished(FinishReason.LENGTH, Usage(1, 1))))
SCORED = evolve(generate(), logprobs=2)
VIOLATIONS: Iterable[tuple[Message, tuple[Frame | bytes, ...], str]] = (
    (FlushCache(), (Item(1, codec.encode(Text("x", 1)), 99),), ""),
    (FlushCache(), (End(1, b"\x01\xc1"),), ""),
    (FlushCache(), (Open(1, codec.encode(GetLoad()), 1),), ""),
    (FlushCache(), (b"\xff" * 5,), ""),
    (GetLoad(), (Step([1], [1], [7], [], []),), ""),
    (generate(), (Item(1, codec.encode(Tokens((1, 2, 3))), 1),), ""),
    (generate(), (End(1, codec.encode(Done())),), ""),
    (generate(), (Item(1, codec.encode(Started(-1)), 0),), ""),
    (generate(), (Item(1, codec.encode(Tokens((7,))), 1),), ""),
    (generate(), (END,), ""),
    (generate(), (STARTED, STARTED), ""),
    (SCORED, (STARTED, Item(1, codec.encode(Tokens((7,))), 1)), ""),
    (SCORED, (STARTED, Step([1], [1], [7], [], [])), ""),
    (RunRank({}), (Item(1, codec.encode(RankStarted()), 0),) * 2, ""),
    (generate(), (STARTED, Step([1], [1], [-7], [], [])), "token ids"),
    (generate(), (STARTED, Step([1], [1], [], [], [])), "arrays"),
    # What else a step may hold only an engine's host sends.
    (generate(), (STARTED, Step([1], [1], [7], [], [Ended(1, FinishReason.STOP, 1, 1, 0)])), "more than tokens"),
)


@pytest.mark.parametrize(("request_", "sent", "reason"), VIOLATIONS, ids=lambda value: repr(value)[:40])
async def test_a_violation_ends_the_link_and_fails_its_askers(
    request_: Message, sent: tuple[Frame | bytes, ...], reason: str, autojump_clock: MockClock
) -> None:
    async with hand_written(heartbeat=Heartbeat()) as other:
        _, answer = other.link.open(request_, 5)
        await other.send(*sent)
        with trio.fail_after(1), pytest.raises(LinkLost):
            await answer.result()
        assert isinstance(other.ended, PeerViolation)
        assert reason in str(other.ended)


async def test_replies_that_take_no_credit_are_limited(autojump_clock: MockClock) -> None:
    async with hand_written(room=100_000) as other:
        other.link.open(generate(), 5)
        free = Item(1, codec.encode(Tokens(())), 0)
        await other.send(STARTED, *[free] * (FREE_REPLIES_MAX - 1))
        assert other.ended is None
        await other.send(free)
        assert isinstance(other.ended, PeerViolation)


async def test_a_frame_of_this_end_that_breaks_the_rules_ends_the_link_as_a_bug_of_this_node(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    address, inbox = mailbox(1)
    async with hand_written(services={("", FlushCache): address}) as other:
        await other.send(Open(1, codec.encode(FlushCache()), 1))
        call = await inbox.receive()
        other.link.peer.served.step(End(1, b""))  # closed for the protocol, but not for the call
        call.answer.put(Tokens((1,)))
        await wait_all_tasks_blocked()
        assert isinstance(other.ended, LocalViolation)
        assert "on stream 1, which is closed" in str(other.link.ended)
        (record,) = bugs_logged(caplog)
        assert record.exc_info is not None
        assert (record.levelname, record.exc_info[1]) == ("ERROR", other.link.ended)
        assert other.far.in_flight == 0, "the other end is sent nothing about it"
