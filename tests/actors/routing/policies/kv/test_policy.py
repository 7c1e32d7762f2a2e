"""The policy `kv`: the costs of workers, and the choice among them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from attrs import define, evolve

from actors.routing.candidates import LEADING_MAX, TakenChoice
from actors.routing.load import Load
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import ANSWER_BLOCKS_MAX, HOLDERS_MAX, LEAST_LOADED_MAX, KvPolicy, KvSettings
from actors.routing.policies.kv.recent import RECENT_S
from actors.routing.policies.session import SessionWorkers
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.block_hashes import block_hashes, block_hashes_after, root_digest
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, PromptBlocks, RoutingHints
from protocol.messages.kv_events import BlockChange, BlockEvent
from protocol.token_ids import TokenIds
from tests.rig.router import Fake, FakePool, Loads, generate

STORED, REMOVED, CLEARED = BlockChange.STORED, BlockChange.REMOVED, BlockChange.CLEARED

PAGE = 16
PROMPT = list(range(100, 100 + 10 * PAGE))


def wanted(prompt: Sequence[int] = PROMPT, session: str = "", salt: str | None = None) -> Generate:
    blocks = PromptBlocks(PAGE, *block_hashes_after(root_digest(salt), TokenIds.of(prompt), PAGE))
    return evolve(generate(prompt=prompt), hints=RoutingHints(session, (blocks,)), cache_salt=salt)


def policy(
    has: dict[str, Sequence[int]] | None = None,
    seed: int = 0,
    now: Callable[[], float] = lambda: 0.0,
    **settings: Any,
) -> KvPolicy:
    made = KvPolicy(
        KvSettings(**{"uncached_weight": 1.0, "load_tokens": 64.0, **settings}),
        PrefixIndex(),
        random.Random(seed).random,
        now,
    )
    for worker, prompt in (has or {}).items():
        event = BlockEvent(STORED, 0, block_hashes(list(prompt), PAGE))
        made.index.apply(worker, [event])
    return made


def chosen(made: KvPolicy, request: Generate, *loads: Load) -> tuple[str, int]:
    """Return the worker that is chosen, and what is expected there; the request ends at once."""
    choice = made(request, Loads(loads))
    assert choice is not None
    assert choice.on_taken is not None
    if (taken := choice.on_taken()) is not None:
        taken.ended()
    return choice.load.name, choice.overlap


A, B, C = (Load(name, 0, 8) for name in "abc")


def test_the_worker_with_the_longest_beginning_is_chosen() -> None:
    made = policy({"a": PROMPT[: 2 * PAGE], "b": PROMPT[: 7 * PAGE + 3]})
    assert chosen(made, wanted(), A, B, C) == ("b", 7 * PAGE)


def test_the_last_token_is_never_expected_in_a_cache() -> None:
    assert chosen(policy({"b": PROMPT}), wanted(), A, B) == ("b", 9 * PAGE)
    assert chosen(policy({"b": PROMPT}), wanted([*PROMPT, 1]), A, B) == ("b", 10 * PAGE)


def test_a_queue_that_is_longer_than_what_is_saved_is_avoided() -> None:
    made = policy({"b": PROMPT})
    assert chosen(made, wanted(), A, evolve(B, queued=8 * PAGE)) == ("b", 9 * PAGE)
    assert chosen(made, wanted(), A, evolve(B, queued=11 * PAGE)) == ("a", 0)


def test_what_is_to_be_computed_for_the_request_counts_more_than_what_is_computed_anyway() -> None:
    made = policy({"b": PROMPT}, uncached_weight=4.0)
    assert chosen(made, wanted(), A, evolve(B, queued=35 * PAGE)) == ("b", 9 * PAGE)
    assert chosen(made, wanted(), A, evolve(B, queued=37 * PAGE)) == ("a", 0)


def test_running_requests_and_kv_memory_count() -> None:
    made = policy({"b": PROMPT})
    assert chosen(made, wanted(), A, evolve(B, busy=2))[0] == "b"
    assert chosen(made, wanted(), A, evolve(B, busy=3))[0] == "a"
    full = evolve(B, kv_tokens=900, kv_tokens_max=1000)
    assert chosen(made, wanted(), A, full)[0] == "a"
    assert chosen(policy(load_tokens=0.0), wanted(), evolve(A, busy=7), evolve(B, queued=PAGE))[0] == "a"


def test_a_worker_without_memory_for_the_request_is_the_last() -> None:
    full = evolve(B, kv_tokens=9_990, kv_tokens_max=10_000)
    assert chosen(policy({"b": PROMPT}, load_tokens=0.0), wanted(), A, full)[0] == "a"


def test_requests_without_a_limit_for_their_answers_go_where_their_beginning_is() -> None:
    asked = wanted()
    unlimited = evolve(asked, sampling=evolve(asked.sampling, tokens_max=131_072))
    has = evolve(B, busy=3, tokens=3 * 4_200, kv_tokens=3 * 4_200, kv_tokens_max=400_000)
    has_not = evolve(has, name="a", busy=2)
    made = policy({"b": PROMPT * 40}, uncached_weight=4.0, load_tokens=256.0)
    assert chosen(made, unlimited, has_not, has)[0] == "b"


def test_a_choice_is_blind_while_a_worker_has_not_told_what_it_has() -> None:
    made = policy({"b": PROMPT})
    made.index.unknown.add("a")
    choice = made(wanted(), Loads([A, B]))
    assert choice is not None
    assert choice.blind
    made.index.unknown.discard("a")
    choice = made(wanted(), Loads([A, B]))
    assert choice is not None
    assert not choice.blind


def test_salted_prompts_match_nothing_that_is_not_theirs() -> None:
    made = policy({"b": PROMPT})
    assert chosen(made, wanted(salt="tenant"), A, B)[1] == 0
    made.index.apply("a", [BlockEvent(STORED, 0, block_hashes(PROMPT, PAGE, "tenant"))])
    assert chosen(made, wanted(salt="tenant"), A, B) == ("a", 9 * PAGE)
    assert chosen(made, wanted(), A, B) == ("b", 9 * PAGE)


def test_of_near_equals_one_is_drawn() -> None:
    made = policy()
    counts = Counter(chosen(made, wanted(), A, B, C)[0] for _ in range(300))
    assert min(counts[name] for name in "abc") > 70
    assert chosen(made, wanted(), A, B, evolve(C, busy=1))[0] != "c"


def test_the_worker_of_a_session_is_preferred_softly() -> None:
    made = policy(session_tokens=100.0)
    home = chosen(made, wanted(session="s"), A, B, C)[0]
    assert {chosen(made, wanted(session="s"), A, B, C)[0] for _ in range(50)} == {home}
    others = [load for load in (A, B, C) if load.name != home]
    at_home = next(load for load in (A, B, C) if load.name == home)
    assert chosen(made, wanted(session="s"), *others, evolve(at_home, busy=2))[0] != home


def test_a_temperature_spreads_by_cost() -> None:
    made = policy({"a": PROMPT}, temperature=0.5)
    counts = Counter(chosen(made, wanted(), A, B)[0] for _ in range(2000))
    assert 0.85 < counts["a"] / 2000 < 0.91  # 1 / (1 + exp(-2))


def test_decodes_are_compared_by_their_load_alone() -> None:
    decodes = [evolve(load, leg=Leg.DECODE, busy=busy) for load, busy in ((A, 2), (B, 1), (C, 3))]
    made = policy({"c": PROMPT})
    assert chosen(made, wanted(), *decodes) == ("b", 0)
    prefills = [evolve(load, leg=Leg.PREFILL) for load in (A, B, C)]
    assert chosen(made, wanted(), *prefills) == ("c", 9 * PAGE)


def test_without_events_load_decides() -> None:
    request = evolve(generate(prompt=PROMPT), hints=None)
    assert chosen(policy(), request, evolve(A, busy=2), B) == ("b", 0)
    assert policy()(request, Loads([])) is None


async def burst(prompts: list[list[int]], workers: int) -> Counter[str]:
    """Route requests in one turn, so that nothing is known of those before but that they were routed."""
    fakes = [Fake(f"w{number}", slots=1000) for number in range(workers)]
    made = policy(uncached_weight=KvSettings().uncached_weight, load_tokens=KvSettings().load_tokens)
    routing = Routing(FakePool([*fakes], None), made, FailoverLimits(), lambda: 1, lambda: "", 0, frozenset())
    return Counter(route.name for route in map(routing.choose, map(wanted, prompts)) if route is not None)


async def test_a_burst_of_equal_prompts_does_not_herd() -> None:
    counts = await burst([PROMPT * 10] * 200, workers=4)
    assert sum(counts.values()) == 200
    assert max(counts.values()) <= 1.5 * 50


async def test_prompts_of_a_burst_that_begin_alike_go_together() -> None:
    rng = random.Random(3)
    groups = [[rng.randrange(1000) for _ in range(100 * PAGE)] for _ in range(16)]
    fakes = [Fake(f"w{number}", slots=1000) for number in range(4)]
    routing = Routing(FakePool([*fakes], None), policy(), FailoverLimits(), lambda: 1, lambda: "", 0, frozenset())
    homes: dict[int, set[str]] = {}
    for _ in range(4):
        for number, group in enumerate(groups):
            route = routing.choose(wanted([*group, rng.randrange(1000)]))
            assert route is not None
            homes.setdefault(number, set()).add(route.name)
    assert sum(map(len, homes.values())) <= 1.5 * len(groups), "most groups are computed once"


async def test_what_is_expected_ends_with_the_route() -> None:
    fakes = [Fake("w0"), Fake("w1")]
    made = policy()
    routing = Routing(FakePool([*fakes], None), made, FailoverLimits(), lambda: 1, lambda: "", 0, frozenset())
    routes = [route for route in map(routing.choose, [wanted()] * 4) if route is not None]
    assert len(made.expected) == 4
    routes[0].begun()
    for route in routes:
        route.end()
        route.end()
    assert len(made.expected) == 0
    assert routing.statistics().requests == 0


@define
class Clock:
    now_s: float = 0.0


def taken(made: KvPolicy, request: Generate, load: Load) -> TakenChoice:
    choice = made(request, Loads([load]))
    assert choice is not None
    assert choice.on_taken is not None
    followed = choice.on_taken()
    assert followed is not None
    return followed


def test_a_computed_prompt_and_an_answer_are_expected_until_their_events_must_have_come() -> None:
    clock, answer = Clock(), list(range(2 * PAGE))
    made = policy({"a": PROMPT[:PAGE]}, now=lambda: clock.now_s)
    request = wanted(PROMPT[: 3 * PAGE + 3])
    further = wanted([*request.tokens, *answer, *range(PAGE)])
    first = taken(made, request, A)
    first.begun()
    assert chosen(made, further, A) == ("a", 3 * PAGE)
    first.answered(answer)
    first.ended()
    assert chosen(made, further, A) == ("a", 5 * PAGE)
    assert chosen(made, further, A, B) == ("a", 5 * PAGE)
    clock.now_s += RECENT_S
    assert chosen(made, further, A) == ("a", PAGE), "it has told of no more"
    assert len(made.recent) == 0


@pytest.mark.parametrize("ends", [(3, 5, 6, 8), (2, 4, 7, 8), range(1, 9)])
def test_events_that_come_one_after_another_leave_what_follows_expected(ends: Iterable[int]) -> None:
    made, answer = policy({"a": PROMPT[:PAGE]}), [7] * 2 * PAGE
    first = wanted(PROMPT[: 3 * PAGE])
    second = wanted([*first.tokens, *answer, *range(PAGE + 1)])
    for request in (first, second):
        followed = taken(made, request, A)
        followed.begun()
        followed.answered(answer)
        followed.ended()
    third = wanted([*second.tokens, *answer, *range(PAGE)])
    assert chosen(made, third, A) == ("a", 8 * PAGE)
    for told in pairwise([0, *ends]):
        made.index.apply("a", [BlockEvent(STORED, 0, hashes_of(third)[slice(*told)])])
        assert chosen(made, third, A) == ("a", 8 * PAGE), told
    assert len(made.recent) == 0, "it has told of all"


def test_what_a_worker_has_told_of_and_dropped_is_expected_no_more() -> None:
    made = policy({"a": PROMPT[:PAGE]})
    followed = taken(made, wanted(), A)
    followed.begun()
    hashes = hashes_of(wanted())
    made.index.apply("a", [BlockEvent(STORED, 0, hashes[1:])])
    made.index.apply("a", [BlockEvent(REMOVED, 0, hashes[4:])])
    assert chosen(made, wanted(), A) == ("a", 4 * PAGE)


def hashes_of(request: Generate) -> tuple[int, ...]:
    assert request.hints is not None
    return tuple(request.hints.blocks[0].hashes)


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_an_answer_of_a_pair_is_in_no_cache(leg: Leg) -> None:
    made = policy({"a": PROMPT[:PAGE]})
    choice = made(wanted(PROMPT[:PAGE]), Loads([evolve(A, leg=leg)]))
    assert choice is not None
    assert choice.on_taken is not None
    if (followed := choice.on_taken()) is not None:
        followed.begun()
        followed.answered([1] * 3 * PAGE)
    assert len(made.recent) == 0


def test_an_answer_is_not_expected_behind_what_was_not_hashed() -> None:
    made = policy({"a": PROMPT[:PAGE]})
    request = wanted(PROMPT[: 3 * PAGE])
    blocks = PromptBlocks(PAGE, *block_hashes_after(b"", TokenIds.of(PROMPT[:PAGE]), PAGE))  # and an image behind it
    followed = taken(made, evolve(request, hints=RoutingHints("", (blocks,))), A)
    followed.begun()
    followed.answered([1] * 3 * PAGE)
    assert len(made.recent) == 0
    longest = taken(made, request, A)
    longest.begun()
    longest.answered([1] * (ANSWER_BLOCKS_MAX * PAGE + 1))
    assert len(made.recent) == 1, "its prompt alone"
    longest.answered([1] * ANSWER_BLOCKS_MAX * PAGE)
    assert len(made.recent) == 2


def of_both_sizes(prompt: Sequence[int] = PROMPT) -> Generate:
    blocks = (PromptBlocks(size, *block_hashes_after(b"", TokenIds.of(prompt), size)) for size in (PAGE, 4 * PAGE))
    return evolve(wanted(prompt), hints=RoutingHints("", tuple(blocks)))


def test_a_prompt_is_expected_in_the_pages_of_the_worker_that_computes_it() -> None:
    made, large = policy(), evolve(B, page_size=4 * PAGE)
    shorter = of_both_sizes(PROMPT[: 6 * PAGE])
    first = taken(made, of_both_sizes(), large)
    assert chosen(made, shorter, large) == ("b", 4 * PAGE)
    made.index.add_holders("b", 1)
    first.begun()
    assert chosen(made, shorter, large) == ("b", 4 * PAGE), "computed just now"
    hashes = block_hashes_after(b"", TokenIds.of(PROMPT), 4 * PAGE)[0]
    made.index.apply("b", [BlockEvent(STORED, 0, tuple(hashes)), BlockEvent(REMOVED, 0, tuple(hashes[1:]))])
    assert chosen(made, of_both_sizes(), large) == ("b", 4 * PAGE), "nothing of another size hides an eviction"


@pytest.mark.parametrize("size", [PAGE, 4 * PAGE])
def test_an_answer_is_expected_in_the_pages_of_its_worker(size: int) -> None:
    made, worker = policy(), evolve(B, page_size=size)
    made.index.add_holders("b", 1)
    followed = taken(made, of_both_sizes(), worker)
    followed.begun()
    followed.answered([*range(3 * PAGE)])
    request = of_both_sizes([*PROMPT, *range(3 * PAGE), 1])
    assert chosen(made, request, worker) == ("b", 13 * PAGE // size * size)


def test_what_a_life_of_a_cache_has_is_not_expected_in_the_next_one() -> None:
    made = policy({"a": PROMPT[:PAGE]})
    followed = taken(made, wanted(), A)
    followed.begun()
    made.index.apply("a", [BlockEvent(CLEARED, 0)])
    made.index.add_holders("a", 1)
    followed.answered([1] * 3 * PAGE)
    assert len(made.recent) == 1, "of the life before"
    assert chosen(made, wanted(), A) == ("a", 0)
    made.index.apply("a", [BlockEvent(STORED, 0, block_hashes(PROMPT[:PAGE], PAGE))])
    assert chosen(made, wanted(), A) == ("a", PAGE)


async def test_what_an_earlier_request_is_to_compute_counts_as_cached_only_once_it_has() -> None:
    fakes, made = [Fake("w0", slots=8)], policy({"w0": [1] * PAGE})
    routing = Routing(FakePool([*fakes], None), made, FailoverLimits(), lambda: 1, lambda: "", 0, frozenset())
    leader, follower = routing.choose(wanted()), routing.choose(wanted([*PROMPT, 1]))
    assert leader is not None
    assert follower is not None
    assert (follower.overlap, follower.cached, follower.uncached) == (10 * PAGE, 0, len(PROMPT) + 1)
    leader.begun()
    later = routing.choose(wanted([*PROMPT, 2]))
    assert later is not None
    assert (later.overlap, later.cached, later.uncached) == (10 * PAGE, 10 * PAGE, 1)
    for route in (leader, follower, later):
        route.end()


@pytest.mark.parametrize(("kv_tokens", "preferred_max"), [(0, LEAST_LOADED_MAX), (2**20, LEADING_MAX)])
def test_few_workers_are_looked_at_however_many_there_are(kv_tokens: int, preferred_max: int) -> None:
    class Counting(Loads):
        looks = 0

        def find(self, name: str) -> Load | None:
            Counting.looks += 1
            return super().find(name)

        def __iter__(self) -> Any:
            for load in self.every:
                Counting.looks += 1
                yield load

    loads = [Load(f"w{number}", 0, 8, kv_tokens=kv_tokens, kv_tokens_max=2**20) for number in range(1000)]
    made = policy({load.name: PROMPT for load in loads})
    assert made(wanted(), Counting(loads)) is not None
    assert Counting.looks <= HOLDERS_MAX + preferred_max + 1


def test_a_worker_with_memory_is_found_behind_some_that_have_none() -> None:
    full = [Load(f"w{number}", 0, 8, kv_tokens=1000, kv_tokens_max=1000) for number in range(2 * LEAST_LOADED_MAX)]
    assert chosen(policy(), wanted(), *full, Load("z", 1, 8, kv_tokens_max=1000)) == ("z", 0)


# Ranks ---------------------------------------------------------------------------------------


def of_ranks(*ranks: int, engine: str = "a") -> list[Load]:
    return [Load(f"{engine}#{rank}", 0, 8) for rank in ranks]


def test_a_prefix_counts_for_the_rank_that_has_it_and_for_no_other() -> None:
    made = policy()
    made.index.apply("a", [BlockEvent(STORED, 1, block_hashes(PROMPT[: 7 * PAGE], PAGE))])
    assert chosen(made, wanted(), *of_ranks(0, 1, 2), B) == ("a#1", 7 * PAGE)
    made.index.apply("a", [BlockEvent(STORED, 0, block_hashes(PROMPT[: 8 * PAGE], PAGE))])
    assert chosen(made, wanted(), *of_ranks(0, 1, 2), B) == ("a#0", 8 * PAGE)
    made.index.apply("a", [BlockEvent(CLEARED, 0)])
    assert chosen(made, wanted(), *of_ranks(0, 1, 2), B) == ("a#1", 7 * PAGE)


def test_a_rank_with_a_prefix_is_compared_however_many_less_loaded_ones_there_are() -> None:
    made = policy()
    made.index.apply("z", [BlockEvent(STORED, 11, block_hashes(PROMPT, PAGE))])
    others = [Load(f"{letter}#{rank}", 0, 8) for letter in "abcd" for rank in range(8)]
    few = Loads([*others, *of_ranks(*range(12), engine="z")])
    choice = made(wanted(), few)
    assert choice is not None
    assert (choice.load.name, choice.overlap) == ("z#11", 9 * PAGE)


def test_the_sessions_of_one_owner_push_out_its_own_alone() -> None:
    made = policy()
    made.sessions = SessionWorkers(2)
    for number in range(4):
        for owner, session in (("bob", "mine"), ("alice", f"{number}")):
            chosen(made, evolve(wanted(session=session), owner=owner), A, B)
    assert made.sessions.get(A.leg, "mine") is not None
