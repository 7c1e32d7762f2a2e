"""Resumed requests: their usage, their penalties, their weights, and no reservation left behind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.fast_path import FastPath
from actors.routing.candidates import Candidates, Choice
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.ports import RoutingObserver
from protocol.errors import EngineLost, LinkLost
from protocol.messages.generation import Generate, RouteTaken, Started, Tokens, Usage
from protocol.messages.text import Text
from protocol.weight_versions import VersionRecord
from tests.rig.gateway import INFO
from tests.rig.router import PROMPT, Fake, Play, ask, check_whole, generate, pair, routed, text
from tests.rig.vision import embedded, image, pixels_of, video


async def test_the_cached_tokens_are_those_of_the_first_prefill_though_the_second_has_more(
    autojump_clock: MockClock,
) -> None:
    plays = {"prefill": [Play(cached=3), Play(cached=5)], "decode": [Play(LinkLost("gone"), 2)]}
    async with routed(*pair(**plays)) as rig:
        got = await ask(rig, generate())
        assert len(rig.worker("p").asked) == 2
        assert got.finished.usage == Usage(4, 6, 3)


@pytest.mark.parametrize("claimed", [Usage(0, 0), Usage(2**50, 2**50, 2**50)], ids=str)
async def test_tokens_are_counted_here_whatever_a_worker_claims(claimed: Usage, autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(LinkLost("gone"), 2)], otherwise=Play(usage=claimed))) as rig:
        assert (await ask(rig, generate())).finished.usage == Usage(4, 6)


async def test_a_worker_that_claims_more_cached_tokens_than_the_prompt_has_is_not_believed(
    autojump_clock: MockClock,
) -> None:
    too_many = Play(cached=2**50)
    async with routed(Fake("a", otherwise=too_many)) as rig:
        got = await ask(rig, generate())
        assert (got.replies[0], got.finished.usage) == (Started(4), Usage(4, 6, 4))
    async with routed(*pair(prefill=[too_many])) as rig:
        assert (await ask(rig, generate())).finished.usage == Usage(4, 6, 4)


async def test_a_pair_without_a_rendezvous_leaves_no_reservation(autojump_clock: MockClock) -> None:
    async with routed(*pair(), Fake("w")) as rig:
        prefill = rig.worker("p")
        await wait_all_tasks_blocked()

        def forgetful(request: Generate, candidates: Candidates) -> Choice | None:
            if [load.name for load in candidates] == ["d"]:  # the prefill has just been chosen
                prefill.info = None
            return least_loaded(request, candidates)

        rig.routing.policy = forgetful
        got = await ask(rig, generate())
        assert len(got.ids) == 6
        assert len(rig.worker("w").asked) == 1  # and `routed` sees that no place is kept


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 0.5}, {"presence_penalty": -0.5}, {"repetition_penalty": 1.05}]
)
async def test_an_answer_with_a_penalty_goes_on_elsewhere_with_the_number_of_tokens_sent(
    penalty: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with routed(Fake("a", [Play(EngineLost("gone"), 3)]), Fake("b")) as rig:
        wanted = generate(**penalty)
        check_whole(await ask(rig, wanted), wanted)
        assert (rig.worker("b").asked[0].resumed_tokens, rig.worker("b").asked[0].tokens[4:].tolist()) == (
            3,
            text(PROMPT)[:3],
        )


@pytest.mark.parametrize("at_once", [False, True])
async def test_tokens_that_skipped_the_router_are_not_sent_again_by_the_next_worker(
    at_once: bool, autojump_clock: MockClock
) -> None:
    lost = Play(LinkLost("gone"), 3, at_once=at_once)
    async with routed(Fake("a", [lost]), Fake("b", [evolve(lost, tokens=2)]), Fake("c")) as rig:
        wanted, replies = generate(tokens_max=9), list[Any]()
        texts: list[int] = []
        path = FastPath[Text](lambda text, _: texts.append(int(text.text)))
        path.open({token: Text(str(token), 1) for token in range(100)})
        async with rig.address.ask(wanted, 9) as answer:
            finished = await answer.relay(replies.append, fast_path=path)
        sent = text(PROMPT)[:9]
        assert [rig.worker(name).asked[0].tokens[4:].tolist() for name in "abc"] == [[], sent[:3], sent[:5]]
        general = [token for reply in replies if isinstance(reply, Tokens) for token in reply.ids]
        assert general == [sent[0], sent[3], sent[5]], "the first of each worker goes the general way"
        assert texts == [sent[place] for place in (1, 2, 4, 6, 7, 8)]
        assert finished is not None
        assert finished.usage == Usage(4, 9)


async def test_an_answer_does_not_go_on_with_other_weights(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("gone"), 3)]), Fake("b")) as rig:
        rig.pool.has = "old"
        rig.pool.change("b")
        wanted = generate("x", tokens_max=10)
        async with trio.open_nursery() as nursery:

            async def turns() -> None:
                await trio.sleep(2.5)
                rig.pool.has = "new"
                rig.pool.change("a")

            nursery.start_soon(turns)
            with pytest.raises(EngineLost):
                await ask(rig, wanted)
        assert rig.worker("b").asked == []
        check_whole(await ask(rig, generate("y")), generate("y"))  # what begins now begins with the new ones


async def test_a_prefill_gets_the_embeddings_and_a_decode_their_places_in_every_attempt(
    autojump_clock: MockClock,
) -> None:
    media = (embedded(pixels_of(image("a", 2))), embedded(pixels_of(video("b", 1))))
    async with routed(*pair(decode=[Play(LinkLost("gone"), 2)])) as rig:
        request = evolve(generate(), media=media)
        check_whole(await ask(rig, request), request)
        prefills, decodes = rig.worker("p").asked, rig.worker("d").asked
        assert [request.media for request in prefills] == [media] * 2
        assert [request.media for request in decodes] == [tuple(item.place for item in media)] * 2


# What the policy hears -----------------------------------------------------------------------------


@define(eq=False)
class Follower:
    """A policy that notes what becomes of its choices, by worker."""

    heard: dict[str, list[Any]] = field(factory=dict)

    def __call__(self, request: Generate, candidates: Candidates) -> Choice | None:
        choice = least_loaded(request, candidates)
        return None if choice is None else evolve(choice, on_taken=partial(self._follow, choice.load.name))

    def _follow(self, name: str) -> Followed:
        return Followed(self.heard.setdefault(name, ["taken"]))


@define(eq=False)
class Followed:
    notes: list[Any]

    def begun(self) -> None:
        self.notes.append("begun")

    def answered(self, ids: Sequence[int]) -> None:
        self.notes.append([*ids])

    def ended(self) -> None:
        self.notes.append("ended")


@pytest.mark.parametrize(
    ("length", "ahead", "computed"), [(9, False, 5), (9, True, 5), (3, False, 3), (3, True, 4), (3, None, 3)]
)
async def test_a_policy_hears_what_becomes_of_its_choice_and_what_was_computed_of_the_answer(
    length: int, ahead: bool | None, computed: int, autojump_clock: MockClock
) -> None:
    policy, info = Follower(), None if ahead is None else evolve(INFO, computes_ahead=ahead)
    async with routed(Fake("a", [Play(length=length)], info=info)) as rig:
        rig.routing.policy = policy
        ids = (await ask(rig, generate())).ids
    assert len(ids) == min(6, length + 1), "the token that stops it is the last"
    assert policy.heard == {"a": ["taken", "begun", ids[:computed], "ended"]}


@define(eq=False)
class Predictions(RoutingObserver):
    """Notes what was predicted when an answer begins."""

    noted: list[Any] = field(factory=list)

    def answer_begun(self, overlap: int | None, cached: int, blind: bool) -> None:
        self.noted.append(overlap)


async def test_what_was_expected_when_the_prefill_was_chosen_is_predicted(autojump_clock: MockClock) -> None:
    observer = Predictions()

    def policy(request: Generate, candidates: Candidates) -> Choice | None:
        choice = least_loaded(request, candidates)
        return choice and evolve(choice, overlap=3 if choice.load.name == "p" else 2, score=1.0)

    async with routed(*pair()) as rig:
        rig.routing.policy, rig.routing.observer = policy, observer
        got = await ask(rig, generate())
    started = got.replies[0]
    assert started.route == RouteTaken("p+d", 3, 1.0)
    assert observer.noted == [3]


async def test_a_policy_does_not_hear_of_an_answer_that_several_workers_computed(autojump_clock: MockClock) -> None:
    policy = Follower()
    async with routed(Fake("a", [Play(LinkLost("gone"), 2)]), Fake("b"), Fake("c", slots=1)) as rig:
        rig.routing.policy = policy
        wanted = generate()
        check_whole(await ask(rig, wanted), wanted)
    assert policy.heard == {"a": ["taken", "begun", "ended"], "b": ["taken", "begun", "ended"]}


async def test_a_policy_hears_of_a_prompt_that_never_began(autojump_clock: MockClock) -> None:
    policy = Follower()
    async with routed(Fake("a")) as rig:
        rig.routing.policy = policy
        with trio.move_on_after(0.5):
            await ask(rig, generate())
    assert policy.heard == {"a": ["taken", "ended"]}


@pytest.mark.parametrize("fast", [False, True])
async def test_the_versions_of_all_workers_are_announced_in_their_order(fast: bool, autojump_clock: MockClock) -> None:
    """An answer has tokens of a worker that was lost, whose version was announced before them."""
    first = Play(LinkLost("gone"), 4, version="one", renewed=("two", 3))
    again = Play(LinkLost("gone"), 1, version="two")
    silent = Play(LinkLost("gone"), 1)  # of an earlier version of this program
    rest = Play(version="three")
    fakes = (Fake("a", [first]), Fake("b", [again]), Fake("c", [silent]), Fake("d", [rest]))
    async with routed(*fakes) as rig:
        record, counted = VersionRecord(), list[int]()
        path = FastPath[Text](lambda text, _: counted.append(int(text.text)))
        if fast:
            path.open({token: Text(str(token), 1) for token in range(100)})

        def note(reply: Started | Tokens) -> None:
            if isinstance(reply, Started) or not reply.ids:
                record.announce(reply.version, len(counted))
            else:
                counted.extend(reply.ids)

        async with rig.address.ask(generate(tokens_max=9), 9) as answer:
            await answer.relay(note, fast_path=path)
    assert counted == text(PROMPT)[:9]
    assert record.spans(9) == (("one", 3), ("two", 2), ("", 1), ("three", 3))
