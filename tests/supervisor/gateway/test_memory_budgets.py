"""Budgets of memory that all clients share: taken as bytes come, given back in every case, and bounded by key."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from protocol.errors import Overloaded, TooLarge
from protocol.messages.text import Role, Turn
from supervisor.gateway.histories import Conversation, HistoryStatistics, ResponseHistories, ResponseHistory
from supervisor.gateway.http.request import BODY_BYTES_FREE
from supervisor.gateway.memory import ANSWER_BYTES_FREE
from supervisor.gateway.memory_budgets import Backlogs, MemoryBudget, MemoryBudgetStatistics
from supervisor.gateway.outbox import READ_BYTES
from tests.rig.gateway import chat, create, frame, gateway_client, gateway_rig, head, leave_all, post
from tests.rig.keys import as_, require_keys
from tests.rig.sockets import gateway_websocket, websocket_client


def make_budget(most: int = 100, share: float = 0.75) -> MemoryBudget:
    return MemoryBudget("things", lambda: most, lambda: share)


def test_the_free_bytes_of_a_reservation_are_granted_when_the_budget_is_used_up() -> None:
    budget = make_budget(10)
    with budget.reserving(None) as full, budget.reserving(None, free_bytes=5) as held:
        full.grow(10)
        held.grow(5)
        with pytest.raises(Overloaded):
            held.grow(1)
    assert budget.reserved_bytes == 0


def test_one_key_reserves_at_most_its_share_even_in_one_reservation() -> None:
    budget = make_budget()
    with budget.reserving("a") as one, budget.reserving("a") as two, budget.reserving("b") as other:
        one.grow(70)
        with pytest.raises(Overloaded, match="the key 'a' has its share"):
            two.grow(6)
        other.grow(30)
    with (
        budget.reserving("a", free_bytes=5) as one,
        pytest.raises(TooLarge, match="one request can have 75 of the 100"),
    ):
        one.grow(81)
    with budget.reserving(None) as one:
        one.grow(100)
    assert budget.statistics() == MemoryBudgetStatistics(0, {})


def test_a_reservation_in_pieces_has_as_much_room_as_one_in_one_piece() -> None:
    budget = make_budget()
    with budget.reserving("a", free_bytes=5) as one, budget.reserving("a") as two:
        for _ in range(8):
            one.grow(10)
        with pytest.raises(Overloaded, match="the key 'a' has its share"):
            two.grow(1)
        with pytest.raises(TooLarge):
            one.grow(1)
        one.shrink(50)
        two.grow(1)
        with pytest.raises(Overloaded, match="the key 'a' has its share"):
            one.grow(50)
    assert budget.statistics() == MemoryBudgetStatistics(0, {})


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["grow", "shrink", "release"]), st.integers(0, 50)), max_size=40
)


@given(STEPS)
def test_a_budget_is_the_sum_of_its_reservations(steps: list[tuple[int, str, int]]) -> None:
    budget = make_budget()
    owners = ["a", "a", "b", None]
    holders = [budget.reserve(owner, free) for owner, free in zip(owners, (0, 5, 0, 10), strict=True)]
    for which, what, size in steps:
        held = holders[which]
        if what == "release":
            held.release()
        elif what == "shrink":
            held.shrink(min(size, held.size_bytes))
        else:
            with suppress(Overloaded, TooLarge):
                held.grow(size)
        counted = [max(0, reservation.size_bytes - reservation.free_bytes) for reservation in holders]
        assert budget.reserved_bytes == sum(counted) <= 100
        by_owner = {"a": counted[0] + counted[1], "b": counted[2]}
        assert budget.statistics().by_owner == {owner: size for owner, size in by_owner.items() if size}
    for held in holders:
        held.release()
    assert budget.statistics() == MemoryBudgetStatistics(0, {})


# Bodies --------------------------------------------------------------------------------------------


def large(size: int, **headers: str) -> bytes:
    body = json.dumps(chat("n=1")).encode()
    return post(body[:-1] + b" " * (size - len(body)) + b"}", **headers)


async def test_bodies_of_all_clients_share_a_limit_by_the_bytes_received(rather_slow: MockClock) -> None:
    async with gateway_rig(bodies_bytes_max=100_000, close_s=0.1) as rig:
        slow, late, small = [await rig.client() for _ in range(3)]
        await slow.send(large(90_000)[:1000])
        await late.send(large(90_000)[:80_000])
        await trio.sleep(1)
        assert 40_000 < rig.gateway.memory.bodies.reserved_bytes < 80_000, "by what has come, not by what was promised"
        await slow.send(large(90_000)[1000:])
        reply = await slow.reply()
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
        assert "bodies_bytes_max" in reply.error["message"]
        assert (await small.ask(large(BODY_BYTES_FREE))).status == 200
        await late.send(large(90_000)[80_000:])
        assert (await late.reply()).status == 200
        await late.stream.aclose()
        await trio.sleep(1)
        assert rig.gateway.memory.bodies.reserved_bytes == 0
        await leave_all(rig)


async def test_requests_that_wait_in_lanes_share_the_limit_of_bodies(rather_slow: MockClock) -> None:
    async with gateway_websocket(bodies_bytes_max=50_000, websocket_running_max=1) as (rig, client):
        await client.say(create("n=1 s=5 " + "x" * 600, stream_id="a"))
        for lane in "bcdefg":
            await client.say(create("n=1 " + "x" * 10_000, stream_id=lane, instructions="y" * 10_000))
        refused = [event for event in await client.events("error") if event["type"] == "error"]
        assert refused[0]["error"]["code"] == "overloaded"
        assert rig.gateway.memory.bodies.reserved_bytes > 20_000
        await leave_all(rig)


async def test_half_a_message_counts_by_the_bytes_received(rather_slow: MockClock) -> None:
    async with gateway_rig(bodies_bytes_max=300_000) as rig:
        require_keys(rig)
        clients = [await websocket_client(rig, **as_("alice")) for _ in range(4)]
        begun = bytes([0x81, 0xFF]) + (400_000).to_bytes(8, "big") + bytes(4) + b" " * 200_000
        for client in clients:
            await client.send(begun)
        await trio.sleep(1)
        assert rig.gateway.memory.bodies.reserved_bytes <= 225_000
        codes = []
        for client in clients[:1] + clients[-1:]:
            with trio.move_on_after(5):
                codes.append(await client.close_code())
        assert 1013 in codes
        await leave_all(rig)


async def test_a_message_that_was_taken_gives_back_only_its_own_memory(rather_slow: MockClock) -> None:
    async with gateway_websocket(bodies_bytes_max=300_000) as (rig, client):
        begun = bytes([0x81, 0xFF]) + (200_000).to_bytes(8, "big") + bytes(4) + b" " * 100_000
        await client.send(frame(b'{"type": "response.cancel"}') + frame(b"ping", 0x89) + begun)
        await trio.sleep(1)
        assert rig.gateway.memory.bodies.reserved_bytes == 100_000 - READ_BYTES
        await client.send(b" " * 100_000)
        await trio.sleep(1)
        assert rig.gateway.memory.bodies.reserved_bytes == 0
        await leave_all(rig)


# Answers in one piece ------------------------------------------------------------------------------


async def test_a_response_in_one_piece_that_never_fits_is_refused_with_its_parameter(
    rather_slow: MockClock,
) -> None:
    async with gateway_client(answers_bytes_max=10_000) as (rig, client):
        asked = chat("n=5", max_completion_tokens=100, n=2, logprobs=True, top_logprobs=5)
        reply = await client.ask(post(asked))
        assert (reply.status, reply.error["param"]) == (400, "max_completion_tokens")
        assert "answers_bytes_max" in reply.error["message"]
        streamed = await client.ask(post({**asked, "stream": True}))
        assert streamed.status == 200
        assert rig.gateway.memory.answers.reserved_bytes == 0


async def test_responses_in_one_piece_share_a_limit(rather_slow: MockClock) -> None:
    async with gateway_rig(answers_bytes_max=8_000) as rig:
        first, second = await rig.client(), await rig.client()
        asked = chat("n=5 s=1", max_completion_tokens=800, logprobs=True, top_logprobs=0)
        await first.send(post(asked))
        await trio.sleep(1)
        assert rig.gateway.memory.answers.reserved_bytes == 800 * (8 + 80) - ANSWER_BYTES_FREE
        refused = await second.ask(post(asked))
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert (await first.reply()).status == 200
        assert (await second.ask(post(asked))).status == 200
        await trio.sleep(0.1)
        assert rig.gateway.memory.answers.reserved_bytes == 0


async def test_no_request_of_a_key_keeps_the_answers_of_others_from_their_memory(rather_slow: MockClock) -> None:
    """The cost of many choices with log probabilities was all of the budget but 16 bytes: others got `overloaded`."""
    async with gateway_rig(requests_max=64, answers_bytes_max=4_000_000) as rig:
        require_keys(rig)
        greedy, late, small = [await rig.client() for _ in range(3)]
        asked = chat("n=5 s=1", n=20, logprobs=True, top_logprobs=4, max_completion_tokens=480)
        refused = await greedy.ask(post(asked, **as_("alice")))
        assert (refused.status, refused.error["code"]) == (400, "invalid_request")
        assert refused.error["param"] == "max_completion_tokens"
        assert "one request can have 3065536 of the 4000000 for all (answers_bytes_max)" in refused.error["message"]
        assert refused.error["message"].endswith("stream it, or ask for fewer tokens, or for fewer answers (n)")
        assert "retry-after" not in refused.headers
        await greedy.send(post({**asked, "n": 15}, **as_("alice")))
        await trio.sleep(1)
        assert rig.gateway.memory.answers.reserved_bytes > 2_800_000
        full = await late.ask(post({**asked, "n": 10}, **as_("bob")))
        assert full.status == 503, "what is left is not for everything"
        assert (await small.ask(post(chat("n=5", max_completion_tokens=400), **as_("bob")))).status == 200
        assert (await greedy.reply()).status == 200


async def test_a_short_answer_has_memory_when_the_budget_is_used_up(rather_slow: MockClock) -> None:
    async with gateway_rig(answers_bytes_max=1) as rig:
        reply = await (await rig.client()).ask(post(chat("n=5")))
        assert reply.status == 200


# Conversations -------------------------------------------------------------------------------------


def conversation(size: int, name: str = "r") -> Conversation:
    turn = Turn(Role.USER, "x" * size)
    return Conversation.after(None, name, turn)


def test_the_owner_of_most_conversations_forgets_first() -> None:
    shared = ResponseHistories(lambda: 100_000)
    greedy = [ResponseHistory(80_000, shared, "greedy") for _ in range(4)]
    honest = ResponseHistory(80_000, shared, "honest")
    honest.remember(None, conversation(10_000, "mine"))
    for number in range(40):
        greedy[number % 4].remember(str(number), conversation(9_000, f"r{number}"))
        assert shared.size_bytes <= 100_000
    assert honest.find("mine") is not None
    assert greedy[39 % 4].find("r39") is not None, "of one's own the oldest goes"
    for memory in (*greedy, honest):
        memory.clear()
    assert shared.statistics() == HistoryStatistics(0, {})


def test_room_for_a_long_conversation_takes_few_scans_of_all_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, largest = [], ResponseHistories.largest
    monkeypatch.setattr(ResponseHistories, "largest", lambda self: looks.append(1) or largest(self))  # type: ignore[func-returns-value]
    shared = ResponseHistories(lambda: 1_000_000)
    crowd = [ResponseHistory(10**6, shared, "crowd") for _ in range(32)]
    for number in range(3000):
        crowd[number % 32].remember(str(number), Conversation("", (), 400))
    before = len(looks)
    ResponseHistory(10**6, shared, "one").remember(None, Conversation("", (), 450_000))
    assert 900_000 < shared.size_bytes <= 1_000_000
    assert len(looks) - before <= 64, "of 1,125 conversations that had to go"
    assert max(each.size_bytes for each in crowd) < 2.2 * min(each.size_bytes for each in crowd)


def test_a_conversation_larger_than_the_total_is_not_kept() -> None:
    shared = ResponseHistories(lambda: 1000)
    memory = ResponseHistory(80_000, shared, "a")
    memory.remember(None, conversation(10_000))
    assert (memory.size_bytes, shared.statistics()) == (0, HistoryStatistics(0, {}))


# Backlogs ------------------------------------------------------------------------------------------


def test_beyond_half_of_all_backlogs_each_client_has_its_share_of_the_other_half() -> None:
    backlogs = Backlogs(lambda: 1000)
    assert backlogs.allows(0, 500)
    assert not backlogs.allows(0, 501)
    backlogs.size_bytes, backlogs.count = 600, 4
    assert backlogs.allows(25, 100)
    assert not backlogs.allows(26, 100)


async def test_backlogs_of_all_clients_share_a_limit_and_a_client_that_reads_is_not_dropped(
    rather_slow: MockClock,
) -> None:
    async with gateway_rig(backlogs_bytes_max=200_000, send_buffer_bytes=4096, close_s=0.1) as rig:
        greedy = [await rig.connect(receive_buffer=2304) for _ in range(6)]
        for stream in greedy:
            await stream.send_all(post(chat("n=900", stream=True, max_completion_tokens=900)))
        await trio.sleep(1)
        assert rig.gateway.memory.backlogs.size_bytes <= 220_000
        client = await rig.client()
        reply = await client.ask(post(chat("n=50 s=0.01", stream=True, max_completion_tokens=50)))
        assert (reply.status, reply.whole) == (200, True)
        await client.stream.aclose()
        await leave_all(rig)
        assert rig.gateway.memory.backlogs.count == 0
        assert b'espalier_clients_dropped_total{reason="backlog"}' in rig.metrics.render({})


async def test_a_probe_is_answered_when_all_budgets_are_used_up(rather_slow: MockClock) -> None:
    async with gateway_rig(bodies_bytes_max=1, answers_bytes_max=1, histories_bytes_max=1, backlogs_bytes_max=1) as rig:
        assert (await (await rig.client()).ask(head())).status == 200
