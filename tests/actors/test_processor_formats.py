"""The processor with a format that has markers: whole, in choices, with candidates, and behind a lost worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.kit.fast_path import FastPath
from actors.text.formats.table import AnswerFormat
from protocol.errors import LinkLost
from protocol.messages.text import Respond, Role, Text, Turn
from tests.actors.test_processor import LIMITS, ask, respond, running
from tests.actors.text.test_staged_text import joined
from tests.rig import router
from tests.rig.gateway import TINY, Worker, ids
from tests.rig.marked_format import Marked
from tests.rig.router import EOS, Fake, Play, routed

LINE = 'An oak. [think]Is it [t old?[/think] Yes. [call f]{"a": [1]}[/call] An oak.'
MARKED = evolve(TINY, answers=AnswerFormat("hermes", "think"))
PIECES = [
    ("Text", -1, "", "An oak. "),
    ("Reasoning", -1, "", "Is it [t old?"),
    ("Text", -1, "", " Yes. "),
    ("CallPart", 0, "f", '{"a": [1]}'),
    ("Text", -1, "", " An oak."),
]


@pytest.fixture(autouse=True)
def _format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.text.choices.make_stage", lambda *_: Marked())


def of_choice(replies: Sequence[Any], choice: int) -> list[Any]:
    kinds = {"Text", "Reasoning", "CallPart"}
    return [reply for reply in replies if type(reply).__name__ in kinds and reply.choice == choice]


def longest(**fields: Any) -> Respond:
    return respond(f"n={len(ids(LINE))}", **fields)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2, "token_ids": True}], ids=str)
async def test_every_choice_has_the_pieces_of_its_format(fields: dict[str, Any], autojump_clock: MockClock) -> None:
    async with running(Worker(line=LINE), MARKED, evolve(LIMITS, total_max=500, prompt_max=500)) as address:
        replies, answered = await ask(address, longest(n=2, **fields))
    for choice in (0, 1):
        pieces = of_choice(replies, choice)
        assert joined(pieces) == PIECES
        assert sum(piece.tokens for piece in pieces) == len(ids(LINE))
        if fields:
            assert [token for piece in pieces for token in piece.ids] == ids(LINE)
            assert sum(len(piece.logprobs) for piece in pieces) == len(ids(LINE))
    assert answered.usage.completion_tokens == 2 * len(ids(LINE))


async def test_a_candidate_that_is_chosen_is_divided_when_it_is_replayed(autojump_clock: MockClock) -> None:
    async with running(Worker(line=LINE), MARKED, evolve(LIMITS, total_max=500, prompt_max=500)) as address:
        replies, _ = await ask(address, longest(n=1, best_of=2))
    assert joined(of_choice(replies, 0)) == PIECES


async def test_tokens_take_the_fast_path_while_the_format_passes_text_through(autojump_clock: MockClock) -> None:
    fast, replies = list[str](), list[Any]()

    def receive(text: Text, _: float) -> None:
        fast.append(text.text)
        replies.append(text)

    limits = evolve(LIMITS, total_max=500, prompt_max=500)
    async with running(Worker(line=LINE), MARKED, limits) as address, address.ask(longest(), 500) as answer:
        await answer.relay(replies.append, fast_path=FastPath(receive))
    pieces = of_choice(replies, 0)
    assert joined(pieces) == PIECES
    assert sum(piece.tokens for piece in pieces) == len(ids(LINE))
    assert "".join(fast).count("oak") == 2, "before the first marker and behind the last"
    assert not {"[", "I", "{"} & set("".join(fast))


@pytest.mark.parametrize("sent", range(1, len(ids(LINE))))
async def test_an_answer_that_goes_on_at_another_worker_has_the_same_pieces(
    sent: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "text", lambda *_: [*ids(LINE), EOS])
    lost = Fake("a", [Play(LinkLost("gone"), sent)])
    async with routed(lost, Fake("b")) as rig, running(rig.address, MARKED) as address:  # type: ignore[arg-type]
        request = Respond("a" * 32, (Turn(Role.USER, "x"),), tokens_max=len(ids(LINE)), token_ids=True)
        with trio.fail_after(1000):
            replies, answered = await ask(address, request)
        pieces = of_choice(replies, 0)
        assert joined(pieces) == PIECES
        assert [token for piece in pieces for token in piece.ids] == ids(LINE)
        assert answered.usage.completion_tokens == len(ids(LINE))
        assert rig.worker("b").asked[0].resumed_tokens == sent
