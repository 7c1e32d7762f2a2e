"""The choices of one request: each is read by itself, all fail together, and the usage counts each token once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from trio.testing import MockClock

from actors.kit.calls import Answer
from actors.kit.offload import OFFLOAD_SIZE_MIN, T
from actors.text.choices import Choices
from actors.text.limits import PromptLimits
from protocol.errors import BadRequest, ContextTooLong, EngineLost, Unsupported
from protocol.messages.generation import (
    Finished,
    FinishReason,
    Generate,
    Grammar,
    GrammarKind,
    Logprob,
    Sampling,
    Started,
    Tokens,
    Usage,
)
from protocol.messages.text import (
    Accepted,
    Answered,
    ChoiceEnded,
    Detokenize,
    Detokenized,
    Respond,
    Role,
    Text,
    Tokenize,
    Tokenized,
    Turn,
)
from protocol.token_ids import TokenIds
from tests.actors.test_processor import CONTENTS, ask, respond, running
from tests.actors.text.test_detokenizer import SENTENCEPIECE
from tests.rig.gateway import INFO, TINY, Worker, ids, load_with_fixed_clock

ROOMY = PromptLimits(INFO, 2048, 1024)


def text_of(replies: Sequence[Started | Accepted | ChoiceEnded | Text], choice: int = 0) -> str:
    return "".join(each.text for each in replies if isinstance(each, Text) and each.choice == choice)


def texts(*prompts: str, **fields: Any) -> Respond:
    return Respond("b" * 32, texts=prompts, **fields)


async def test_every_choice_is_answered_and_the_prompt_counts_once(autojump_clock: MockClock) -> None:
    worker = Worker(cached=3)
    async with running(worker, limits=ROOMY) as address:
        replies, answered = await ask(address, respond("n=4", n=3))
    prompt = replies[0].prompt_tokens
    assert [text_of(replies, choice) for choice in range(3)] == ["The oak is o"] * 3
    ended = sorted(each.choice for each in replies if isinstance(each, ChoiceEnded))
    assert ended == [0, 1, 2]
    assert answered == Answered(Usage(prompt, 12, 3))
    assert len({each.id for each in worker.asked}) == 3
    assert worker.asked[0].id == "a" * 32
    assert {len(each.id) for each in worker.asked} == {32}


async def test_the_first_choice_goes_ahead_so_that_the_others_find_its_prompt(autojump_clock: MockClock) -> None:
    started = []

    class Noting(Worker):
        @asynccontextmanager
        async def ask(self, request: Generate, credit: int) -> AsyncIterator[Answer[Started | Tokens, Finished]]:
            started.append(trio.current_time())
            async with super().ask(request, credit) as answer:
                yield answer

    async with running(Noting(), limits=ROOMY) as address:
        await ask(address, respond("n=2 s=3", n=3))
    assert started == [0, 3, 3]


async def test_a_seed_gives_each_choice_its_own(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        await ask(address, respond("n=1", n=3, seed=2**63 - 1))
        await ask(address, respond("n=1", n=2))
    seeds: list[Any] = [each.sampling.seed for each in worker.asked]
    assert len(set(seeds[:3])) == 3
    assert max(seeds[:3]) == seeds[0] == 2**63 - 1
    assert seeds[3:] == [None, None]


async def test_choices_fail_together_and_leave_nothing_running(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        with pytest.raises(EngineLost):
            await ask(address, texts("n=50 s=1", "n=9 s=1 fail=2"))
        await trio.testing.wait_all_tasks_blocked()
        assert (trio.current_time(), worker.running, worker.left) == (3, 0, 1)


async def test_leaving_ends_every_choice(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        with trio.move_on_after(2.5):
            await ask(address, respond("n=50 s=1", n=4))
        await trio.testing.wait_all_tasks_blocked()
        assert (worker.running, worker.left) == (0, 4)


async def test_of_several_prompts_the_choices_are_numbered_through(autojump_clock: MockClock) -> None:
    async with running(limits=ROOMY) as address:
        replies, answered = await ask(address, texts("n=1 x", "n=2 x", n=2))
    assert [text_of(replies, choice) for choice in range(4)] == ["The", "The", "The oak", "The oak"]
    assert answered.usage == Usage(len(ids("n=1 x")) + len(ids("n=2 x")), 6)


async def test_token_ids_go_in_and_come_out(autojump_clock: MockClock) -> None:
    worker = Worker()
    prompt = tuple(ids("n=3 x"))
    async with running(worker, limits=ROOMY) as address:
        replies, _ = await ask(address, Respond("b" * 32, token_lists=(prompt,), token_ids=True))
    assert worker.asked[0].tokens.tolist() == list(prompt)
    assert [token for each in replies if isinstance(each, Text) for token in each.ids] == ids("The oak is")


async def test_an_echo_begins_with_the_prompt_and_costs_nothing(autojump_clock: MockClock) -> None:
    async with running(limits=ROOMY) as address:
        replies, answered = await ask(address, texts("n=2 x", echo=True))
    assert text_of(replies) == "n=2 xThe oak"
    assert answered.usage.completion_tokens == 2


async def test_a_long_echo_is_read_aside_and_once_a_prompt(autojump_clock: MockClock) -> None:
    read: list[str] = []

    async def aside(function: Callable[[], T], **_: object) -> T:
        await trio.sleep(1)
        if isinstance(result := function(), str):  # the ids are looked at aside, too
            read.append(result)
        return result

    long, short = tuple(ids("n=1 " + "oak " * OFFLOAD_SIZE_MIN))[:OFFLOAD_SIZE_MIN], tuple(ids("n=1 x"))
    async with running(limits=PromptLimits(INFO, 10**6, 10**6), aside=aside) as address:
        replies, _ = await ask(address, Respond("b" * 32, token_lists=(long, short), n=2, echo=True))
        assert read == [TINY.decode(long)]
        prompts = [TINY.decode(long), "n=1 x"]
        assert [text_of(replies, choice) for choice in range(4)] == [text + "The" for text in prompts for _ in range(2)]
        await ask(address, Respond("b" * 32, token_lists=(short,), echo=True))
        await ask(address, Respond("b" * 32, token_lists=(long,)))
    assert len(read) == 1


async def test_an_id_that_reads_as_nothing_is_refused_before_the_request_is_accepted(autojump_clock: MockClock) -> None:
    worker, replies = Worker(), list[Any]()
    asked = Respond("b" * 32, token_lists=((599,),), echo=True, params={"turns": "prompt"})
    padded = PromptLimits(evolve(INFO, vocabulary_size=600), 2048, 2048)  # engines round it up
    async with running(worker, limits=padded) as address, address.ask(asked, 10_000) as answer:
        with pytest.raises(BadRequest, match="not all token ids") as caught:
            await answer.relay(replies.append)
    assert (caught.value.param, replies, worker.prompts) == ("prompt", [], [])


async def test_the_likeliest_of_many_choices_is_sent_and_all_are_in_the_usage(autojump_clock: MockClock) -> None:
    lines = ("bad bad", "The oak", "so so")

    class Poet(Worker):
        async def _answer(self, request: Generate, answer: Answer[Started | Tokens, Finished]) -> None:
            choice = int(request.id[-4:], 16) ^ 0xBBBB
            sequence = ids(lines[choice])
            answer.put(Started(0), 0)
            for token in sequence:
                answer.put(Tokens((token,), (Logprob((-3.0, -0.5, -2.0)[choice]),)), 1)
            answer.end(Finished(FinishReason.STOP, Usage(len(request.tokens), len(sequence))))

    async with running(Poet(), limits=ROOMY) as address:
        replies, answered = await ask(address, texts("x", n=2, best_of=3))
    assert (text_of(replies, 0), text_of(replies, 1)) == ("The oak", "so so")
    assert not any(each.logprobs for each in replies if isinstance(each, Text))
    assert answered.usage.completion_tokens == sum(len(ids(line)) for line in lines)


async def test_a_warm_up_request_computes_its_prompt_and_sends_no_text(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        replies, answered = await ask(address, respond("n=9 s=1", warm_up=True, tokens_min=5))
    assert worker.asked[0].sampling.tokens_max == 1
    assert worker.asked[0].sampling.tokens_min == 0
    assert [type(each) for each in replies] == [Accepted, Started, ChoiceEnded]
    assert replies[-1] == ChoiceEnded(FinishReason.LENGTH), "it reached what it was asked for"
    assert answered.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("asked", "kind", "param", "words"),
    [
        (texts("x", "", params={"turns": "prompt"}), BadRequest, "prompt", "prompt 1 is empty"),
        (
            Respond("b" * 32, token_lists=((1, 512),), params={"turns": "prompt"}),
            BadRequest,
            "prompt",
            "outside 0 to 511",
        ),
        (Respond("b" * 32, token_lists=((-1,),)), BadRequest, "turns", "outside"),
        (Respond("b" * 32, token_lists=((1,) * 1025,)), ContextTooLong, "turns", "prompts here can have 1024"),
        (respond(logit_bias={512: 1.0}), BadRequest, "logit_bias", "end at 511"),
        (respond(logprobs=513), BadRequest, "logprobs", "512 tokens"),
    ],
)
async def test_what_does_not_fit_is_refused_before_any_choice_runs(
    asked: Respond, kind: type[BadRequest | ContextTooLong], param: str, words: str, autojump_clock: MockClock
) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        with pytest.raises(kind, match=words) as caught:
            await ask(address, asked)
    assert caught.value.param == param
    assert worker.prompts == []


async def test_a_grammar_that_the_engine_does_not_know_is_refused_by_name(autojump_clock: MockClock) -> None:
    plain = PromptLimits(evolve(INFO, grammars=()), 2048, 2048)
    grammar = Grammar(GrammarKind.REGEX, "a+")
    async with running(limits=plain) as address:
        with pytest.raises(Unsupported) as caught:
            await ask(address, respond(grammar=grammar, params={"grammar": "regex"}))
        assert caught.value.param == "regex"
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        await ask(address, respond(grammar=grammar))
    assert worker.asked[0].sampling.grammar == grammar


# Truncation ------------------------------------------------------------------------------

ALTERNATING = """
{%- set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- messages[0]['content'] if messages[0]['role'] == 'system' }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '[INST] ' + message['content'] + ' [/INST]' if message['role'] == 'user' else message['content'] }}
{%- endfor %}"""  # as Mistral's and Llama 2's do


def talk(count: int) -> tuple[Any, ...]:
    turns = [Turn(Role.SYSTEM, "Be kind.")]
    turns += [
        Turn((Role.USER, Role.ASSISTANT)[place % 2], f"n=1 {place} and some more words") for place in range(count)
    ]
    return tuple(turns)


@pytest.mark.parametrize("count", range(3, 42, 6))
@pytest.mark.parametrize("kept", [0, 1])
async def test_a_truncated_conversation_begins_with_a_user(count: int, kept: int, autojump_clock: MockClock) -> None:
    model, worker, turns = load_with_fixed_clock(CONTENTS, ALTERNATING), Worker(), talk(count)[1 - kept :]
    async with running(worker, model, PromptLimits(INFO, 300, 300)) as address:
        await ask(address, respond(turns=turns, tokens_max=20, truncate=True))
    cuts = [turns[:kept] + turns[kept + cut :] for cut in range(0, count, 2)]
    wanted = next(tokens for cut in cuts if len(tokens := model.encode(cut)) + 20 <= 300)
    assert worker.asked[0].tokens == wanted


async def test_what_fits_is_not_truncated_and_the_last_turn_never_is(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, limits=ROOMY) as address:
        await ask(address, respond(turns=talk(3), truncate=True))
        with pytest.raises(ContextTooLong):
            await ask(address, respond("word " * 1000, truncate=True))
    assert worker.asked[0].tokens == TINY.encode(talk(3))


# Tokens ----------------------------------------------------------------------------------


async def test_text_and_tokens_are_turned_into_each_other(autojump_clock: MockClock) -> None:
    async with running(limits=ROOMY) as address:
        _, there = await ask(address, Tokenize(text="The oak, wörld 🙂"))
        assert there == Tokenized(TokenIds.of(ids("The oak, wörld 🙂")), 2048)
        assert (await ask(address, Detokenize(tuple(there.ids))))[1] == Detokenized("The oak, wörld 🙂")
        _, turns = await ask(address, Tokenize(turns=(Turn(Role.USER, "Hi"),)))
        assert turns.ids == TINY.encode([Turn(Role.USER, "Hi")])
        with pytest.raises(BadRequest) as caught:
            await ask(address, Detokenize((512,)))
        assert caught.value.param == "tokens"
        assert (await ask(address, Tokenize(text="")))[1].ids == TokenIds()


class Says:
    """A worker that answers everything with one word."""

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Answer[Started | Tokens, Finished]]:
        await trio.lowlevel.checkpoint()
        answer: Answer[Started | Tokens, Finished] = Answer(credit)
        answer.put(Started(), 0)
        answer.put(Tokens((SENTENCEPIECE.get_vocab()["▁the"],), (Logprob(-1.0),)), 1)
        answer.end(Finished(FinishReason.STOP, Usage(len(request.tokens), 1)))
        yield answer


@pytest.mark.parametrize("best_of", [1, 2])
async def test_a_choice_is_the_text_behind_its_prompt(best_of: int) -> None:
    """Decoded by itself it would lose the space before its first word."""
    replies: list[Any] = []
    model = evolve(TINY, tokenizer=SENTENCEPIECE, whole_tokens=None)
    prompt = [SENTENCEPIECE.get_vocab()["a"]]
    generations = [Generate(f"g{choice}", TokenIds.of(prompt), Sampling(5), 0) for choice in range(best_of)]
    await Choices(texts("a", best_of=best_of), model, Says(), replies.append).read([generations])
    assert text_of(replies) == " the"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (("one", 2), ("two", 4))),
        ({"stop": ("is",)}, (("one", 2), ("two", 1))),  # the answer is left there
        ({"stop": ("oak",)}, (("one", 2),)),
        ({"logprobs": 1}, (("one", 2), ("two", 4))),
        ({"token_ids": True}, (("one", 2), ("two", 4))),
        ({"warm_up": True}, ()),
    ],
)
async def test_a_choice_has_the_versions_of_its_tokens(
    fields: dict[str, Any], expected: object, autojump_clock: MockClock
) -> None:
    worker = Worker(line="The oak is old and", version="one", renewed={2: "two"})
    async with running(worker, limits=ROOMY) as address:
        replies, answered = await ask(address, texts("n=6", **fields))
    assert replies[-1].weight_versions == expected
    assert answered.usage.completion_tokens == sum(count for _, count in replies[-1].weight_versions)


async def test_each_of_several_choices_has_its_own_versions(autojump_clock: MockClock) -> None:
    worker = Worker(version="one", renewed={2: "two"})
    async with running(worker, limits=ROOMY) as address:
        replies, _ = await ask(address, texts("n=4", "n=1", n=2))
        best, _ = await ask(address, texts("n=4", n=1, best_of=2))
    versions = {each.choice: each.weight_versions for each in replies if isinstance(each, ChoiceEnded)}
    assert versions == dict.fromkeys((0, 1), (("one", 2), ("two", 2))) | dict.fromkeys((2, 3), (("one", 1),))
    assert best[-1].weight_versions == (("one", 2), ("two", 2))
