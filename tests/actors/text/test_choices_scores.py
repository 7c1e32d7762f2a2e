"""The choices of a request whose echoed prompts have log probabilities: the engine computes them once a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from trio.testing import MockClock

from actors.kit.calls import Answer
from actors.text.limits import PromptLimits
from protocol.cost import SCORES_MAX
from protocol.errors import BadRequest, EngineLost, Unsupported
from protocol.messages.generation import Finished, FinishReason, Generate, Logprob, Started, Tokens, Usage
from protocol.messages.text import Accepted, ChoiceEnded, Respond, Text
from tests.actors.test_processor import ask, running
from tests.rig.gateway import INFO, TINY, Worker, ids
from tests.rig.prompt_scores import scores_of

ROOMY = PromptLimits(INFO, 2048, 1024)


def scored(*prompts: str, logprobs: int = 1, **fields: Any) -> Respond:
    return Respond("b" * 32, texts=prompts, echo=True, logprobs=logprobs, params={"turns": "prompt"}, **fields)


def pieces_of(replies: list[Any], choice: int = 0) -> list[Text]:
    return [each for each in replies if isinstance(each, Text) and each.choice == choice]


def entries_of(replies: list[Any], choice: int = 0) -> list[tuple[str, float | None]]:
    return [(entry.text, entry.logprob) for piece in pieces_of(replies, choice) for entry in piece.logprobs]


def expected(worker: Worker, index: int) -> list[float | None]:
    """Return the log probabilities of the prompt that the worker was asked about by one of its requests."""
    scores = scores_of(evolve(worker.asked[index], prompt_logprobs=True))
    assert scores is not None
    return [None, *scores.logprobs.data.cast("B").cast("f").tolist()]


async def test_the_prompt_and_then_the_answer_have_an_entry_a_token(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        replies, answered = await ask(address, scored("n=3 s=2 oak"))
    assert [type(each) for each in replies[:2]] == [Accepted, Started]
    assert replies[1].scores is None, "no client of the processor reads them twice"
    assert "".join(piece.text for piece in pieces_of(replies)) == "n=3 s=2 oakThe oak is"
    prompt = len(ids("n=3 s=2 oak"))
    entries = entries_of(replies)
    assert [logprob for _, logprob in entries[:prompt]] == expected(worker, 0)
    assert [text for text, _ in entries[prompt:]] == ["The", " oak", " is"]
    assert answered.usage == Usage(prompt, 3)
    assert worker.asked[0].prompt_logprobs


async def test_several_choices_share_the_scores_of_their_prompt(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        replies, _ = await ask(address, scored("n=1 s=1 x", "n=2 s=1 y", n=2, logprobs=3))
    asked = {(each.id, each.prompt_logprobs) for each in worker.asked}
    assert sorted(wanted for _, wanted in asked) == [False, False, True, True]
    for first, texts in ((0, "n=1 s=1 xThe"), (2, "n=2 s=1 yThe oak")):
        assert entries_of(replies, first) == entries_of(replies, first + 1)
        assert {"".join(piece.text for piece in pieces_of(replies, first + more)) for more in range(2)} == {texts}


async def test_the_best_of_several_begin_with_their_prompt(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        replies, answered = await ask(address, scored("n=2 x", best_of=3))
    prompt = len(ids("n=2 x"))
    assert [text for text, _ in entries_of(replies)[prompt:]] == ["The", " oak"]
    assert [logprob for _, logprob in entries_of(replies)[:prompt]] == expected(worker, 0)
    assert answered.usage == Usage(prompt, 6)


async def test_of_an_answer_without_a_token_only_the_prompt_comes(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        replies, answered = await ask(address, scored("n=50 s=1 x", warm_up=True, tokens_max=1))
        assert trio.current_time() == 1
        silent, _ = await ask(address, Respond("c" * 32, texts=("n=50 x",), warm_up=True, tokens_max=1))
    prompt = len(ids("n=50 s=1 x"))
    assert len(entries_of(replies)) == prompt
    assert replies[-1] == ChoiceEnded(FinishReason.LENGTH)
    assert answered.usage == Usage(prompt, 0)
    assert pieces_of(silent) == []


async def test_the_end_of_a_text_has_an_entry_behind_an_echo(autojump_clock: MockClock) -> None:
    """An evaluation takes the last entry for that of the one answered token, and drops it."""
    (end, *_) = TINY.eos_token_ids

    class Ending(Worker):
        async def _answer(self, request: Generate, answer: Answer[Started | Tokens, Finished]) -> None:
            await trio.lowlevel.checkpoint()
            answer.put(Started(scores=scores_of(request)), 0)
            answer.put(Tokens((end,), (Logprob(-0.25, ((end, -0.25),)),)), 1)
            answer.end(Finished(FinishReason.STOP, Usage(len(request.tokens), 1), end))

    async with running(Ending(), limits=ROOMY) as address:
        replies, _ = await ask(address, scored("The oak", tokens_max=1))
        plain, _ = await ask(address, evolve(scored("The oak", tokens_max=1), echo=False))
    assert "".join(piece.text for piece in pieces_of(replies)) == "The oak"
    assert entries_of(replies)[-1] == (TINY.tokenizer.id_to_token(end), -0.25)
    assert len(entries_of(replies)) == len(ids("The oak")) + 1
    assert entries_of(plain) == []


async def test_an_engine_without_them_is_refused_by_the_field(autojump_clock: MockClock) -> None:
    class Unscored(Worker):
        async def _answer(self, request: Generate, answer: Answer[Started | Tokens, Finished]) -> None:
            await super()._answer(evolve(request, prompt_logprobs=False), answer)

    worker = Unscored()
    async with running(worker, limits=ROOMY) as address:
        with pytest.raises(Unsupported, match="computes no log probabilities of a prompt") as caught:
            await ask(address, scored("n=50 s=1 x"))
        await trio.testing.wait_all_tasks_blocked()
    assert caught.value.param == "echo"
    assert worker.running == 0


async def test_a_failure_before_the_first_token_is_the_answers(autojump_clock: MockClock) -> None:
    async with running(Worker(), limits=ROOMY) as address:
        with pytest.raises(EngineLost):
            await ask(address, scored("n=5 fail=0 x"))


async def test_too_many_log_probabilities_are_refused_before_an_engine_is_asked(autojump_clock: MockClock) -> None:
    worker, limits = Worker(), PromptLimits(evolve(INFO, request_tokens_max=10**6), 10**6, 10**6)
    asked = Respond("b" * 32, token_lists=((7,) * (SCORES_MAX // 21 + 1),), echo=True, logprobs=20, tokens_max=1)
    async with running(worker, limits=limits) as address:
        with pytest.raises(BadRequest, match=str(SCORES_MAX)) as caught:
            await ask(address, asked)
    assert (caught.value.param, worker.asked) == ("logprobs", [])


async def test_leaving_in_the_middle_of_an_echo_leaves_the_engine(autojump_clock: MockClock) -> None:
    worker, limits = Worker(), PromptLimits(INFO, 10**5, 10**5)
    asked = Respond("b" * 32, token_lists=(tuple(ids("n=50 s=1 " + "oak " * 5000)),), echo=True, logprobs=20)
    with trio.CancelScope() as scope:
        async with running(worker, limits=limits) as address, address.ask(asked, 10**5) as answer:
            async for reply in answer:
                if isinstance(reply, Text):
                    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert (worker.running, worker.left) == (0, 1)


async def test_without_a_prompt_the_answer_begins_a_text(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        replies, _ = await ask(address, Respond("b" * 32, tokens_max=2, echo=True))
    async with running(worker, evolve(TINY, first_token=None), ROOMY) as address:
        with pytest.raises(BadRequest, match="no token that begins a text") as caught:
            await ask(address, Respond("b" * 32, tokens_max=2, params={"turns": "prompt"}))
    assert worker.asked[0].tokens.tolist() == [0]
    assert "".join(piece.text for piece in pieces_of(replies)) == "<|endoftext|>The oak"
    assert caught.value.param == "prompt"
