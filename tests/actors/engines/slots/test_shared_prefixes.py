"""Prompts that begin alike, by the decode actor and a simulated engine: the first computes it, the others find it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.decode import decode
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.spec import Costs, SimulatedSpec
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.shared_prefixes import SHARED_ENOUGH, SHARED_MIN, HashedPrompt, SharedPrefixes
from actors.engines.slots.slots import Slots
from protocol.messages.generation import Generate, Sampling, Started
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.token_ids import TokenIds
from tests.rig.calls import AnyAddress, priority_inbox

PAGE = 16
STEP_S = 0.01
TOKEN_S = 0.001  # so that a prompt of a thousand tokens takes a second
SAME = list(range(1_000))
DEADLINES = Deadlines(first_token_s=20.0)


def wanted(tokens: list[int], number: int = 0, cached: int = 0, salt: str | None = None) -> Generate:
    return Generate(
        f"{number:032x}", TokenIds.of(tokens), Sampling(4, ignore_eos=True), cached_tokens=cached, cache_salt=salt
    )


def burst(shared: Sequence[int], count: int, own: int = 40) -> list[Generate]:
    """Return requests whose prompts have the same beginning."""
    return [wanted([*shared, *range(2_000 + 100 * n, 2_000 + 100 * n + own)], n) for n in range(count)]


@define(eq=False)
class Client:
    address: AnyAddress
    engine: SimulatedEngine
    prefixes: SharedPrefixes
    first_s: dict[str, float] = field(factory=dict)  # when each request had its first token
    cached: list[int] = field(factory=list)  # tokens found of each prompt, in the order of the first tokens

    async def ask(self, request: Generate) -> None:
        async with self.address.ask(request, request.sampling.tokens_max) as replies:
            async for reply in replies:
                if isinstance(reply, Started):
                    self.first_s[request.id] = trio.current_time()
                    self.cached.append(reply.cached_tokens)

    async def ask_together(self, requests: Sequence[Generate]) -> list[int]:
        """Ask in the order of the requests; return what was found of each in the cache, in order of first tokens."""
        self.cached.clear()
        async with trio.open_nursery() as asking:
            for request in requests:
                asking.start_soon(self.ask, request)
                await wait_all_tasks_blocked()
        return self.cached


@asynccontextmanager
async def serving(slots: int = 16) -> AsyncIterator[Client]:
    costs = Costs(fixed_s=STEP_S, per_prefill_token_s=TOKEN_S, per_running_s=0.0)
    spec = SimulatedSpec(slots=slots, kv_tokens_max=65_536, page_size=PAGE, costs=costs)
    engine, prefixes = SimulatedEngine(spec, Random(0)), SharedPrefixes(PAGE)
    address, inbox = priority_inbox(64, lambda _: 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await nursery.start(decode, inbox, [Slots(engine, slots, DEADLINES, prefixes=prefixes)])
        yield Client(address, engine, prefixes)
        await trio.sleep(10)
        assert not len(prefixes), "a prompt counts that is not computed"
        nursery.cancel_scope.cancel()


async def leave_after(client: Client, request: Generate, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await client.ask(request)


async def test_of_a_burst_the_first_computes_what_all_share(autojump_clock: MockClock) -> None:
    async with serving() as client:
        assert await client.ask_together(burst(SAME, 8)) == [0] + [1_000 // PAGE * PAGE] * 7
        first, *others = client.first_s.values()
        assert max(others) - first < 0.5, "one prefill, and one step for the rest of all others"


async def test_what_is_cached_already_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with serving() as client:
        known = 992
        await client.ask(wanted(SAME, 99))
        requests = [evolve(request, cached_tokens=known) for request in burst(SAME, 8)]
        assert await client.ask_together(requests) == [known] * 8
        times = [client.first_s[request.id] for request in requests]
        assert max(times) - min(times) < 0.05


async def test_a_prompt_that_is_computed_whole_waits_for_no_other(autojump_clock: MockClock) -> None:
    async with serving() as client:
        requests = [evolve(request, logprobs=0, prompt_logprobs=True) for request in burst(SAME, 4)]
        assert await client.ask_together(requests) == [0] * 4
        times = list(client.first_s.values())
        assert max(times) - min(times) < 4 * len(SAME) * TOKEN_S + 0.5, "they are computed side by side"


async def test_what_another_has_found_is_not_waited_for_though_the_router_did_not_know(
    autojump_clock: MockClock,
) -> None:
    prefixes = SharedPrefixes(PAGE)
    first, second, third, longer = (wanted([*SAME, *[n] * 2_000], n) for n in (1, 2, 3, 2))
    await prefixes.wait(evolve(first, cached_tokens=len(SAME)), 1.0)
    await prefixes.wait(second, 1.0)
    await prefixes.wait(third, 1.0)
    assert trio.current_time() == 0
    await prefixes.wait(evolve(longer, id="again"), 1.0)
    assert trio.current_time() == 1.0, "the second computes what is its own"


async def test_other_prompts_pass_those_that_wait(autojump_clock: MockClock) -> None:
    async with serving() as client:
        other = wanted(list(range(5_000, 5_040)), 50)
        await client.ask_together([*burst(SAME, 4), other])
        assert client.first_s[other.id] <= min(time for name, time in client.first_s.items() if name != other.id)


@pytest.mark.parametrize(
    ("shared", "own", "waits"),
    [
        (SHARED_MIN - 1, 0, False),
        (SHARED_MIN, 8, True),
        (SHARED_ENOUGH, 2_000, True),
        (SHARED_ENOUGH - PAGE, 2_000, False),
        (160, 120, True),
        (160, 240, False),
    ],
)
async def test_a_request_waits_only_for_much_of_what_it_would_compute(
    shared: int, own: int, waits: bool, autojump_clock: MockClock
) -> None:
    prefixes = SharedPrefixes(PAGE)
    first, second = (wanted([*SAME[:shared], *range(9_000 * n, 9_000 * n + own)], n) for n in (1, 2))
    await prefixes.wait(first, 1.0)
    began = trio.current_time()
    await prefixes.wait(second, 1.0)
    assert (trio.current_time() > began) is waits
    assert len(prefixes) == 2


async def test_prompts_wait_for_no_cache_that_is_not_theirs(autojump_clock: MockClock) -> None:
    picture = MediaItem(Modality.IMAGE, "aa", (1, 2, 2), 1, MediaForm.PLACES)
    several = [
        wanted(SAME, 1),
        wanted(SAME, 2, salt="a"),
        wanted(SAME, 3, salt="b"),
        evolve(wanted(SAME, 4), media=(picture,)),
        evolve(wanted(SAME, 5), media=(evolve(picture, digest="bb"),)),
        wanted([7, *SAME], 6),
    ]
    prefixes = SharedPrefixes(PAGE)
    for request in several:
        await prefixes.wait(request, 1.0)
    assert trio.current_time() == 0
    for request in several:
        again = evolve(request, id="again")
        with trio.move_on_after(0.5) as waiting:
            await prefixes.wait(again, 1.0)
        assert waiting.cancelled_caught


async def test_very_long_prompts_that_wait_together_are_compared_within_a_moment(autojump_clock: MockClock) -> None:
    shared = list(range(50_000))
    prompts = [wanted([*shared, n, *SAME], n) for n in range(50)]
    prefixes = SharedPrefixes(PAGE)
    await prefixes.wait(prompts[0], 1.0)
    async with trio.open_nursery() as waiting:
        for request in prompts[1:]:
            waiting.start_soon(prefixes.wait, request, 1.0)
        await wait_all_tasks_blocked()
        began = time.thread_time()
        prefixes.discard(prompts[0], has_begun=True)
        await wait_all_tasks_blocked()
    assert time.thread_time() - began < 0.5, "of CPU time: it took seconds while each was compared with each by tokens"
    assert len(prefixes) == 49


@given(st.lists(st.integers(0, 2), max_size=900), st.integers(0, 900), st.lists(st.integers(0, 2), max_size=300))
def test_prompts_have_in_common_what_comparing_them_token_by_token_finds(
    tokens: list[int], same: int, rest: list[int]
) -> None:
    other = [*tokens[:same], *rest]
    common = next((n for n, pair in enumerate(zip(tokens, other, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(tokens), len(other)) if common is None else common
    one, two = (HashedPrompt.of(TokenIds.of(prompt)) for prompt in (tokens, other))
    assert one.common(two) == two.common(one) == common
    for end in {0, common, min(common + 1, len(other)), len(other)}:
        assert one.begins_like(two, end) is (end <= common)


async def test_when_the_first_leaves_the_next_one_computes(autojump_clock: MockClock) -> None:
    async with serving() as client:
        first, *others = burst(SAME, 5)
        async with trio.open_nursery() as asking:
            asking.start_soon(leave_after, client, first, 0.3)
            await wait_all_tasks_blocked()
            assert await client.ask_together(others) == [0] + [992] * 3
        times = sorted(client.first_s.values())
        assert times[0] < 2.2, "after the step that the first was in, and its own"
        assert times[-1] - times[0] < 0.5


async def test_a_request_that_leaves_while_it_waits_holds_nothing(autojump_clock: MockClock) -> None:
    async with serving(slots=3) as client:
        first, *others = burst(SAME, 3)
        async with trio.open_nursery() as asking:
            asking.start_soon(client.ask, first)
            await wait_all_tasks_blocked()
            for request in others:
                await leave_after(client, request, 0.1)
            assert (await client.engine.load()).running == 1
            await client.ask_together([wanted([*range(n, n + 40)], n) for n in (7_000, 8_000)])
        assert len(client.first_s) == 3


async def test_behind_a_prompt_that_stands_still_a_request_waits_half_of_its_deadline(
    autojump_clock: MockClock,
) -> None:
    async with serving() as client, trio.open_nursery() as asking:
        client.engine.stall(15.0)
        for request in burst(SAME, 3):
            asking.start_soon(client.ask, request)
        await trio.sleep(DEADLINES.first_token_s / 2 - 1)
        assert len(client.prefixes) == 1
        await trio.sleep(2)
        assert len(client.prefixes) == 3
    assert len(client.first_s) == 3


async def test_bursts_that_grow_and_leave_end_and_leave_nothing(autojump_clock: MockClock) -> None:
    rng = Random(1)
    async with serving(slots=6) as client:

        async def ask_or_leave(number: int) -> None:
            await trio.sleep(rng.random() * 5)
            tokens = [*SAME[: rng.choice((100, 400, 1_000))], *range(rng.randrange(9_000), 9_000)][:1_500]
            with trio.move_on_after(rng.choice((0.05, 0.5, 60.0))) as leaving:
                await client.ask(wanted(tokens, number))
            whole = client.first_s.get(f"{number:032x}")
            assert whole is not None or leaving.cancelled_caught

        with trio.fail_after(600):
            async with trio.open_nursery() as asking:
                for number in range(200):
                    asking.start_soon(ask_or_leave, number)
