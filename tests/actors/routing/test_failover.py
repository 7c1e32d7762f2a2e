"""A request goes on elsewhere after a loss, within its limits, and its asker sees one answer; drains count by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.engines.simulated.spec import SimulatedSpec
from actors.routing.failover import resumes_exactly
from actors.routing.route import FailoverLimits
from protocol.errors import (
    BadRequest,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineLost,
    InternalError,
    LinkLost,
    NotReady,
    RequestError,
)
from protocol.messages.cluster import Leg
from protocol.messages.generation import Finished, FinishReason, Grammar, GrammarKind, Sampling, Usage
from protocol.token_ids import TokenIds
from tests.rig.router import (
    LOSSES,
    PROMPT,
    Fake,
    Play,
    ask,
    check_ends,
    check_whole,
    generate,
    pair,
    prefill_info,
    routed,
    text,
)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tokens", range(7))
@pytest.mark.parametrize("length", [1000, 5])
async def test_a_loss_at_any_token_is_not_seen(
    loss: type[RequestError], tokens: int, length: int, autojump_clock: MockClock
) -> None:
    lost = Play(loss("gone"), tokens, cached=3, length=length, at_once=tokens > 0)
    async with routed(Fake("a", [lost]), Fake("b", otherwise=Play(cached=4, length=length))) as rig:
        wanted = generate(tokens_max=6, tokens_min=2, logprobs=0)
        got = await ask(rig, wanted)
        check_whole(got, wanted, length, cached=3 if tokens else 4)
        assert [reply.logprobs[0].logprob for reply in got.replies[1:]] == [-token / 8 for token in got.ids]
        asked = rig.worker("b").asked
        assert len(asked) == (tokens < 6), "nobody is asked for what is whole"
        if asked:
            sampling = evolve(wanted.sampling, tokens_max=6 - tokens, tokens_min=max(0, 2 - tokens))
            tokens_ = PROMPT + got.ids[:tokens]
            assert asked == [
                evolve(wanted, id="new 1", tokens=TokenIds.of(tokens_), resumed_tokens=tokens, sampling=sampling)
            ]
            assert rig.worker("b").times == [tokens or 0.5]


async def test_the_word_that_it_was_the_last_token_may_be_lost_even_with_no_resume_left(
    autojump_clock: MockClock,
) -> None:
    lost = Play(EngineLost("gone"), 6, at_once=True)
    async with routed(Fake("a", [lost]), limits=FailoverLimits(resumes_max=0)) as rig:
        grammar = Grammar(GrammarKind.REGEX, "a*")
        check_whole(await ask(rig, generate(grammar=grammar)), generate())


async def test_a_stop_token_ends_whole_too(autojump_clock: MockClock) -> None:
    stop = text(PROMPT)[2]
    async with routed(Fake("a", [Play(LinkLost("gone"), 3, at_once=True)])) as rig:
        got = await ask(rig, generate(stop_token_ids=(stop,)))
        assert got.finished == Finished(FinishReason.STOP, Usage(4, 3), stop)
        assert got.ids == text(PROMPT)[:3]


@pytest.mark.parametrize("error", [BadRequest, ContextTooLong, DeadlineExceeded, InternalError])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_what_is_no_loss_is_passed_as_it_is(
    error: type[RequestError], tokens: int, autojump_clock: MockClock
) -> None:
    failure = error("because", param="x")
    async with routed(Fake("a", [Play(failure, tokens)]), Fake("b")) as rig:
        with pytest.raises(error) as caught:
            await ask(rig, generate())
        assert caught.value is failure
        assert not rig.worker("b").asked


@pytest.mark.parametrize("loss", [EngineLost, LinkLost])
@pytest.mark.parametrize(
    "sampling",
    [
        {"grammar": Grammar(GrammarKind.REGEX, "a*")},
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, "{}"), "repetition_penalty": 1.1},
    ],
)
async def test_what_cannot_be_resumed_exactly_ends_in_the_truth_but_may_begin_elsewhere(
    sampling: dict[str, Any], loss: type[RequestError], autojump_clock: MockClock
) -> None:
    assert not resumes_exactly(evolve(generate(), sampling=Sampling(1, **sampling)))
    plays = [Play(loss("first"), 0), Play(loss("then"), 2)]
    async with routed(Fake("a", plays[:1]), Fake("b", plays[1:], more=2), Fake("c", more=3)) as rig:
        got: list[Any] = []
        with pytest.raises(loss, match="then"):
            await ask(rig, generate(**sampling), got)
        assert len(got) == 3
        assert not rig.worker("c").asked


@pytest.mark.parametrize("sent", range(1, 6))
async def test_an_answer_of_a_diffusion_model_is_resumed_at_the_border_of_a_block_alone(
    sent: int, autojump_clock: MockClock
) -> None:
    lost, info = EngineLost("gone"), evolve(SimulatedSpec().info, diffusion_block=3)
    async with routed(Fake("a", [Play(lost, sent)], info=info), Fake("b", info=info, more=1)) as rig:
        whole = (len(PROMPT) + sent) % 3 == 0
        await check_ends(rig, None if whole else lost)
        assert bool(rig.worker("b").asked) is whole


@pytest.mark.parametrize(("most", "whole"), [(0, False), (1, False), (2, True)])
async def test_a_request_goes_on_as_often_as_it_may(most: int, whole: bool, autojump_clock: MockClock) -> None:
    losses = EngineLost("1"), LinkLost("2")
    workers = [Fake("a", [Play(losses[0], 2)]), Fake("b", [Play(losses[1], 1)], more=1), Fake("c", more=2)]
    async with routed(*workers, limits=FailoverLimits(resumes_max=most)) as rig:
        await check_ends(rig, None if whole else losses[most])
        if whole:
            assert [each.id for worker in workers for each in worker.asked] == ["a", "new 1", "new 2"]
            assert rig.worker("c").asked[0].resumed_tokens == 3


@pytest.mark.parametrize(("most", "whole"), [(3, True), (2, False)])
async def test_a_request_goes_on_with_as_many_tokens_as_it_may(
    most: int, whole: bool, autojump_clock: MockClock
) -> None:
    limits, gone = FailoverLimits(resume_tokens_max=most), EngineLost("gone")
    async with routed(Fake("a", [Play(gone, 3)]), Fake("b"), limits=limits) as rig:
        await check_ends(rig, None if whole else gone)


@pytest.mark.parametrize(("back_s", "whole"), [(9, True), (11, False)])
async def test_a_request_waits_as_long_for_another_worker_as_it_may(
    back_s: int, whole: bool, autojump_clock: MockClock
) -> None:
    gone = LinkLost("gone")
    async with routed(Fake("a", [Play(gone, 3)])) as rig, trio.open_nursery() as nursery:

        async def come_and_go() -> None:
            await trio.sleep(1)
            rig.pool.change("a")
            await trio.sleep(2.5 + back_s)
            rig.pool.back()

        nursery.start_soon(come_and_go)
        await check_ends(rig, None if whole else gone)
        assert rig.worker("a").times == ([0, 12.5] if whole else [0])
        assert trio.current_time() == (15.5 if whole else 13.5)


async def test_a_worker_is_lost_twice_and_asked_again_after_a_pause_where_there_is_no_other(
    autojump_clock: MockClock,
) -> None:
    plays = [Play(LinkLost("1"), 2, cached=1), Play(LinkLost("2"), 2, cached=3)]
    async with routed(Fake("a", plays), limits=FailoverLimits(pause_s=0.5)) as rig:
        check_whole(await ask(rig, generate()), generate(), cached=1)
        assert rig.worker("a").times == [0, 3, 6]
        assert [each.id for each in rig.worker("a").asked] == ["a", "new 1", "new 2"]
        assert [each.resumed_tokens for each in rig.worker("a").asked] == [0, 2, 4]


async def test_a_request_whose_engine_died_is_not_given_to_that_engine_again(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("1"), 2)])) as rig:
        with pytest.raises(EngineLost, match="1"):
            await ask(rig, generate())
        assert (len(rig.worker("a").asked), trio.current_time()) == (1, 2.5), "nobody is worth waiting for"


@pytest.mark.parametrize(("leg", "waits"), [(Leg.PREFILL, True), (Leg.BOTH, True), (Leg.DECODE, False)])
async def test_a_pair_whose_prefill_died_waits_for_another_or_for_a_worker_of_both_legs(
    leg: Leg, waits: bool, autojump_clock: MockClock
) -> None:
    prefill, decode_ = pair(prefill=[Play(EngineLost("p"), 0)])
    async with routed(prefill, decode_, Fake("down", leg=leg, info=prefill_info())) as rig:
        rig.pool.gone = {"down"}
        with pytest.raises(EngineLost, match="p"):
            await ask(rig, generate())
        assert trio.current_time() == (10.5 if waits else 0.5)


async def test_a_lone_worker_that_is_never_ready_is_asked_ever_more_seldom(autojump_clock: MockClock) -> None:
    never = Play(NotReady("it starts"), 0)
    async with routed(Fake("a", [never] * 8, otherwise=never)) as rig:
        with trio.move_on_after(60):
            await ask(rig, generate())
        times = rig.worker("a").times
        assert times[:8] == pytest.approx([0, 0.6, 1.3, 2.2, 3.5, 5.6, 8.1, 10.6])
        assert len(times) < 30


async def test_a_request_that_may_be_what_kills_engines_kills_no_more_of_them(autojump_clock: MockClock) -> None:
    workers = [Fake(name, [Play(EngineLost(name), 0)]) for name in "abc"]
    async with routed(*workers) as rig:
        with pytest.raises(EngineLost, match="b"):
            await ask(rig, generate())
        assert [len(worker.asked) for worker in workers] == [1, 1, 0]


async def test_a_request_that_has_begun_goes_ahead_of_those_that_have_not(autojump_clock: MockClock) -> None:
    workers = Fake("a", [Play(EngineLost("1"), 2)], slots=1), Fake("b", slots=1)
    async with routed(*workers) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(ask, rig, generate("begun"))
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, rig, generate("other"))
        await wait_all_tasks_blocked()
        for number in range(3):
            nursery.start_soon(ask, rig, generate(str(number)))
        await trio.sleep(2.25)
        rig.pool.gone = {"a"}
        await trio.sleep(60)
        asked = [each.id for each in rig.worker("b").asked]
        assert (asked[:2], sorted(asked[2:])) == (["other", "new 1"], ["0", "1", "2"])


async def test_a_request_that_was_resumed_before_counts_all_tokens_sent(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("1"), 2)]), Fake("b")) as rig:
        first = text(PROMPT)[:3]
        got = await ask(rig, evolve(generate(), tokens=TokenIds.of(PROMPT + first), resumed_tokens=3))
        assert got.ids == text(PROMPT)[3:9]
        assert rig.worker("b").asked[0].resumed_tokens == 5


# Planned losses --------------------------------------------------------------------------


class Replaced(LinkLost):
    """What a link is lost with that has made room for a newer one."""

    code = "link_lost"  # of the class that it stands for: a test adds no code to the taxonomy


@pytest.mark.parametrize("loss", [Draining, Replaced])
async def test_five_drains_in_a_row_lose_nothing(loss: type[RequestError], autojump_clock: MockClock) -> None:
    workers = [Fake(str(n), [Play(loss("it goes"), 8)], more=n % 4) for n in range(5)]
    async with routed(*workers, Fake("last", slots=9, more=8)) as rig:
        wanted = generate(tokens_max=50)
        check_whole(await ask(rig, wanted), wanted)
        assert [len(worker.asked) for worker in workers] == [1] * 5


async def test_drains_leave_the_resumes_for_losses(autojump_clock: MockClock) -> None:
    plays = [Draining("1"), LinkLost("2"), Draining("3"), LinkLost("4"), Draining("5"), LinkLost("6")]
    workers = [Fake(str(n), [Play(loss, 2)], slots=8, more=n) for n, loss in enumerate(plays)]
    async with routed(*workers, limits=FailoverLimits(resumes_max=3, pause_s=0.01)) as rig:
        wanted = generate(tokens_max=20)
        check_whole(await ask(rig, wanted), wanted)


@pytest.mark.parametrize(("most", "whole"), [(2, False), (3, True)])
async def test_drains_have_a_limit_of_their_own(most: int, whole: bool, autojump_clock: MockClock) -> None:
    drains = [Draining(str(n)) for n in range(3)]
    workers = [Fake(str(n), [Play(drain, 1)], more=n) for n, drain in enumerate(drains)]
    async with routed(*workers, Fake("last", slots=9, more=8), limits=FailoverLimits(drains_max=most)) as rig:
        await check_ends(rig, None if whole else drains[2])
