"""The log probabilities of a prompt cross a link behind nothing else of their answer, and only if they were asked for."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.errors import PeerViolation
from protocol.link.attachments import WINDOW_BYTES
from protocol.link.peer import PeerStatistics
from protocol.messages.generation import Finished, FinishReason, Generate, Logprob, PromptScores, Started, Tokens, Usage
from protocol.tensors import Dtype, Tensor
from supervisor.links.encoding import reply_rules
from tests.rig.calls import AnyAnswer, AnyCall
from tests.rig.fake_engine import generate
from tests.rig.links import linked
from tests.rig.prompt_scores import scores_of


def scored(prompt: int = 4, likeliest: int = 2) -> Generate:
    return evolve(generate(prompt=prompt), logprobs=likeliest, prompt_logprobs=True)


async def test_they_come_before_the_tokens_though_they_take_many_round_trips(autojump_clock: MockClock) -> None:
    wanted = scored(prompt=2 * WINDOW_BYTES // 8 // 21, likeliest=20)
    tokens = [Tokens((7,), (Logprob(-0.5),)), Tokens((8, 9), (Logprob(-1), Logprob(-2)))]
    finished = Finished(FinishReason.LENGTH, Usage(len(wanted.tokens), 3))

    async def service(call: AnyCall, replies: AnyAnswer) -> None:
        assert call.request == wanted
        await trio.lowlevel.checkpoint()
        replies.put(Started(scores=scores_of(call.request)), 0)
        for reply in tokens:
            replies.put(reply, len(reply.ids))
        replies.end(finished)

    async with linked(service, request=Generate) as ends:
        async with ends.asker.ask(wanted, 3) as answer:
            got = [reply async for reply in answer]
            assert await answer.result() == finished
        assert got == [Started(scores=scores_of(wanted)), *tokens]
        await trio.sleep(20)
        ends.check_at_rest()
        assert ends.asker.peer.statistics() == ends.server.peer.statistics() == PeerStatistics()


@pytest.mark.parametrize("prompt", [4, 2 * WINDOW_BYTES // 8 // 21])
@pytest.mark.parametrize("ends_at_once", [False, True])
async def test_the_link_lives_on_if_they_are_dropped_for_an_asker_that_has_left(
    prompt: int, ends_at_once: bool, autojump_clock: MockClock
) -> None:
    wanted, begun = scored(prompt=prompt, likeliest=20), trio.Event()

    async def service(call: AnyCall, replies: AnyAnswer) -> None:
        await trio.lowlevel.checkpoint()
        begun.set()
        replies.put(Started(scores=scores_of(wanted)), 0)
        replies.put(Tokens((7,), (Logprob(-0.5),)), 1)
        if not ends_at_once:
            await trio.sleep(10)
        replies.end(Finished(FinishReason.LENGTH, Usage(prompt, 1)))

    async with linked(service, request=Generate) as ends:
        async with ends.asker.ask(wanted, 3):
            await begun.wait()
        await trio.sleep(20)
        ends.check_at_rest()
        async with ends.asker.ask(wanted, 3) as answer:
            assert await anext(aiter(answer)) == Started(scores=scores_of(wanted))
        await trio.sleep(20)
        ends.check_at_rest()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (generate(), scored()),
        (evolve(generate(), logprobs=2), scored()),
        (scored(), scored(prompt=5)),
        (scored(), scored(likeliest=3)),
        (evolve(scored(), resumed_tokens=1), scored()),
    ],
)
def test_what_was_not_asked_for_is_a_violation(asked: Generate, found: Generate) -> None:
    with pytest.raises(PeerViolation, match="not asked for"):
        reply_rules(asked).reply(Started(scores=scores_of(found)), 0)
    reply_rules(found).reply(Started(scores=scores_of(found)), 0)
    reply_rules(found).reply(Started(), 0)  # an engine may have none


def tensor(dtype: Dtype, *shape: int) -> Tensor:
    return Tensor(dtype, shape, memoryview(b""))


@pytest.mark.parametrize(
    "tensors",
    [
        (tensor(Dtype.FLOAT16, 3), tensor(Dtype.INT32, 3, 2), tensor(Dtype.FLOAT32, 3, 2)),
        (tensor(Dtype.FLOAT32, 3), tensor(Dtype.FLOAT32, 3, 2), tensor(Dtype.INT32, 3, 2)),
        (tensor(Dtype.FLOAT32, 3), tensor(Dtype.INT32, 2, 2), tensor(Dtype.FLOAT32, 2, 2)),
        (tensor(Dtype.FLOAT32, 3), tensor(Dtype.INT32, 3, 2), tensor(Dtype.FLOAT32, 3, 1)),
        (tensor(Dtype.FLOAT32, 3), tensor(Dtype.INT32, 3), tensor(Dtype.FLOAT32, 3)),
        (tensor(Dtype.FLOAT32), tensor(Dtype.INT32, 3), tensor(Dtype.FLOAT32, 3)),
        (tensor(Dtype.FLOAT32), tensor(Dtype.INT32), tensor(Dtype.FLOAT32)),
        (tensor(Dtype.FLOAT32, 3, 2), tensor(Dtype.INT32, 3, 2, 1), tensor(Dtype.FLOAT32, 3, 2, 1)),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_a_violation(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    with pytest.raises(PeerViolation, match="do not fit"):
        Started(scores=PromptScores(*tensors)).check_tensors()
