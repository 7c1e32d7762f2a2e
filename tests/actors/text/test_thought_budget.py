"""The budget of reasoning: its end closes the reasoning, and the answer goes on."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from trio.testing import MockClock

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.formats.table import AnswerFormat
from actors.text.model import TextModel
from protocol.errors import Unsupported
from protocol.messages.generation import FinishReason, Grammar, GrammarKind
from protocol.messages.text import ChoiceEnded, Reasoning, Text
from tests.actors.test_processor import LIMITS, ask, respond, running
from tests.rig.gateway import TINY, Worker, ids

TEMPLATE = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
ROOM = evolve(LIMITS, total_max=900, prompt_max=500)
THOUGHT = "Is an oak a tree? It has leaves, and it has a stem. So it is one, I think, but is it an old tree?"
ANSWER = "An oak is a tree. It has old leaves, and an old stem, and a broad old crown in the wind."
END = "\n</think>\n\n"


def model() -> TextModel:
    learned = ConversationTemplate.learned(compile_template(TEMPLATE, str), TEMPLATE, {}, salt="1")
    return evolve(TINY, template=learned, answers=AnswerFormat(None, "think"))


class Thinker(Worker):
    """A worker that thinks for ever, and answers once its reasoning is closed."""

    answer = ANSWER

    def ask(self, request: Any, credit: int = 0) -> Any:
        self.line = self.answer if END in TINY.decode(request.tokens) else THOUGHT
        return super().ask(request, credit)


def texts(replies: list[Any], kind: type[Text | Reasoning], choice: int = 0) -> str:
    return "".join(reply.text for reply in replies if isinstance(reply, kind) and reply.choice == choice)


@pytest.mark.parametrize("budget", [0, 1, 5, 12])
async def test_the_end_of_a_budget_closes_the_reasoning_and_not_the_answer(
    budget: int, autojump_clock: MockClock
) -> None:
    worker = Thinker()
    async with running(worker, model(), ROOM) as address:
        request = respond("n=20", thinking_token_budget=budget)
        replies, answered = await ask(address, request)
    thought = texts(replies, Reasoning)
    assert THOUGHT.startswith(thought)
    assert texts(replies, Text) == TINY.decode(ids(ANSWER)[:20])
    assert budget <= answered.usage.reasoning_tokens <= budget + len(ids(END)) + 1
    first, second = worker.asked
    sent = second.tokens[len(first.tokens) :]
    assert TINY.decode(sent) == f"{thought}{END}"
    assert second.resumed_tokens == len(sent)
    assert second.sampling.tokens_max == first.sampling.tokens_max - len(sent)
    assert second.id != first.id
    assert answered.usage.completion_tokens == len(sent) + 20
    assert answered.usage.prompt_tokens == len(first.tokens)
    [ended] = [reply for reply in replies if isinstance(reply, ChoiceEnded)]
    assert ended.reason is FinishReason.STOP


@pytest.mark.parametrize("first", ["\n", "\n\n\n", "🌳 "])
async def test_reasoning_is_closed_once_whatever_the_answer_begins_with(first: str, autojump_clock: MockClock) -> None:
    """Behind a line break, or the first byte of a character, it was closed again within the answer."""
    worker = Thinker()
    worker.answer = f"{first}{ANSWER}"
    async with running(worker, model(), ROOM) as address:
        replies, _ = await ask(address, respond("n=30", thinking_token_budget=5))
    assert texts(replies, Text) == TINY.decode(ids(worker.answer)[:30]).lstrip("\n")
    assert len(worker.asked) == 2


async def test_reasoning_within_its_budget_is_as_without_one(autojump_clock: MockClock) -> None:
    line = f"Hm.{END}{ANSWER}"
    worker = Worker(line=line)
    async with running(worker, model(), ROOM) as address:
        replies, _ = await ask(address, respond(f"n={len(ids(line))}", thinking_token_budget=50))
    assert (texts(replies, Reasoning), texts(replies, Text)) == ("Hm.", ANSWER)
    assert len(worker.asked) == 1


async def test_each_choice_has_a_budget_of_its_own(autojump_clock: MockClock) -> None:
    worker = Thinker()
    async with running(worker, model(), ROOM) as address:
        replies, _ = await ask(address, respond("n=20", thinking_token_budget=4, n=3))
    assert [texts(replies, Text, choice) for choice in range(3)] == [TINY.decode(ids(ANSWER)[:20])] * 3
    assert len({request.id for request in worker.asked}) == 6


async def test_without_room_for_an_answer_the_limit_of_tokens_ends_it(autojump_clock: MockClock) -> None:
    worker = Thinker()
    async with running(worker, model(), ROOM) as address:
        replies, answered = await ask(address, respond("n=9", thinking_token_budget=4, tokens_max=6))
    assert len(worker.asked) == 1
    assert answered.usage.completion_tokens == 6
    assert [reply.reason for reply in replies if isinstance(reply, ChoiceEnded)] == [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("answers", "fields"),
    [
        (AnswerFormat(), {}),
        (AnswerFormat(None, "think"), {"grammar": Grammar(GrammarKind.REGEX, "a+")}),
        (AnswerFormat("gpt-oss"), {}),
    ],
)
async def test_a_budget_that_cannot_be_kept_is_refused(
    answers: AnswerFormat, fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with running(Worker(), evolve(model(), answers=answers), ROOM) as address:
        with pytest.raises(Unsupported) as refused:
            await ask(address, respond("n=3", thinking_token_budget=4, **fields))
    assert refused.value.param == "thinking_token_budget"
