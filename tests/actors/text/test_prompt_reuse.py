"""A turn is tokenised for what is new in it, by key, and a difference from the whole text ends that."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.kit.offload import RunInThread, T, run_inline
from actors.processor import processor
from actors.text.limits import PromptLimits
from actors.text.model import TextModel
from actors.text.prompt_cache import EncodedPrompt, PromptCache
from actors.text.prompt_reuse import CHECKED_ONE_OF, PromptReuse, SelfCheck
from protocol.block_hashes import block_hashes
from protocol.errors import Overloaded
from protocol.messages.adapters import Adapter
from protocol.messages.generation import Generate
from protocol.messages.text import Accepted, Respond, Role, Tokenize, Turn
from protocol.token_ids import TokenIds
from tests.rig.calls import AnyAddress, mailbox
from tests.rig.gateway import INFO, TINY, Worker

PAGES = (1, 16)
LIMITS = PromptLimits(evolve(INFO, context_max=10**6), 10**6, 10**6, PAGES)
WORDS = "An oak is a tree, and an acorn is its fruit; <|im_end|> is a word as well. " * 8


def new_cache(bytes_max: int = 2**20) -> PromptCache:
    return PromptCache(bytes_max, nullcontext())


@asynccontextmanager
async def running(
    cache: PromptCache | None, worker: Worker, run_in_thread: RunInThread = run_inline, model: TextModel = TINY
) -> AsyncIterator[AnyAddress]:
    address, inbox = mailbox(4)
    async with trio.open_nursery() as nursery:
        arguments = inbox, model, worker, lambda: LIMITS, run_in_thread, 4
        await nursery.start(partial(processor, *arguments, prompt_cache=cache))
        yield address
        nursery.cancel_scope.cancel()


def conversation(answers: int) -> list[Turn]:
    turns = [Turn(Role.SYSTEM, f"Be kind. {WORDS}")]
    for number in range(answers):
        turns += Turn(Role.USER, f"{number} {WORDS}"), Turn(Role.ASSISTANT, f"Yes, {number}. {WORDS[number:]}")
    return [*turns, Turn(Role.USER, "n=1")]


async def ask(address: AnyAddress, turns: Sequence[Turn], **fields: Any) -> Accepted:
    request = Respond("a" * 32, tuple(turns), tokens_max=1, **fields)
    async with address.ask(request, 10_000) as answer:
        replies = [reply async for reply in answer]
        await answer.result()
    accepted: Accepted = replies[0]
    return accepted


def blocks_of(asked: Generate) -> list[tuple[int, list[int], bytes]]:
    assert asked.hints is not None
    return [(each.page_size, list(each.hashes), each.digest) for each in asked.hints.blocks]


@pytest.mark.parametrize("bytes_max", [0, 9_000, 2**20])
async def test_an_engine_is_asked_for_the_same_whatever_is_kept(bytes_max: int, autojump_clock: MockClock) -> None:
    cache, with_cache, without = new_cache(bytes_max), Worker(), Worker()
    async with running(cache, with_cache) as one, running(None, without) as other:
        for answers in (0, 1, 2, 3, 2, 5):
            for salt in (None, "salt"):
                await ask(one, conversation(answers), cache_salt=salt)
                await ask(other, conversation(answers), cache_salt=salt)
    for asked, wanted in zip(with_cache.asked, without.asked, strict=True):
        assert asked.tokens == wanted.tokens
        assert blocks_of(asked) == blocks_of(wanted)
        hashes = [(size, list(block_hashes(wanted.tokens, size, wanted.cache_salt))) for size in PAGES]
        assert [(size, hashes) for size, hashes, _ in blocks_of(wanted)] == hashes
    assert cache.statistics().mismatches == 0
    assert cache.statistics().size_bytes <= bytes_max


async def test_a_turn_reuses_the_ids_of_the_turn_before(autojump_clock: MockClock) -> None:
    async with running(cache := new_cache(), Worker()) as address:
        first = await ask(address, conversation(3))
        second = await ask(address, conversation(4))
        async with address.ask(Tokenize(tuple(conversation(4))), 10) as answer:
            tokenized: Any = await answer.result()
    assert first.reused_tokens == 0
    assert first.prompt_tokens > second.reused_tokens > first.prompt_tokens - 20
    assert tokenized.ids == TINY.encode(conversation(4))
    assert cache.statistics().encoded_tokens < second.prompt_tokens + 40


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"owner": "alice"}, {"owner": "bob"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"cache_salt": ""}),
        ({}, {"adapter": Adapter("lora", "0" * 64)}),
    ],
)
async def test_a_first_turn_reuses_nothing_of_another_key(
    one: dict[str, Any], other: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with running(new_cache(), Worker()) as address:
        await ask(address, conversation(3), **one)
        assert (await ask(address, conversation(3), **other)).reused_tokens == 0
        assert (await ask(address, conversation(3), **one)).reused_tokens > 0
        assert (await ask(address, conversation(3), **other)).reused_tokens > 0


# The check in service ---------------------------------------------------------------------------


class Checks:
    """A check whose tasks run when a test says so."""

    def __init__(self, cache: PromptCache, run_in_thread: RunInThread = run_inline) -> None:
        self.tasks = list[Callable[[], Awaitable[None]]]()
        self.check = SelfCheck(cache, self.tasks.append, run_in_thread)


TEXT = TINY.prompt(conversation(2))
RIGHT, WRONG = (EncodedPrompt(ids, reused=10) for ids in (TINY.encode_rendered(TEXT), TokenIds.of([1, 2, 3])))


async def test_one_conversation_of_many_is_checked_and_the_first_one(autojump_clock: MockClock) -> None:
    checks = Checks(cache := new_cache())
    checks.check.sample(TINY, TEXT, evolve(RIGHT, reused=0))
    assert not checks.tasks
    for _ in range(2 * CHECKED_ONE_OF):
        checks.check.sample(TINY, TEXT, RIGHT)
        if len(checks.tasks) == 1:
            await checks.tasks[0]()
    assert len(checks.tasks) == 2
    assert cache.statistics().mismatches == 0


async def test_a_difference_ends_the_use_of_the_cache(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    checks = Checks(cache := new_cache())
    reuse = PromptReuse(checks.check, "", None, PAGES)
    assert TINY.boundary is not None
    for _ in range(2):
        reuse.complete(reuse.find(TEXT, TINY.boundary), TINY, 10**6)
    assert cache.statistics().segments
    with caplog.at_level(logging.ERROR):
        checks.check.sample(TINY, TEXT, WRONG)
        await checks.tasks[0]()
    assert (cache.statistics().segments, cache.statistics().mismatches) == (0, 1)
    (record,) = caplog.records
    assert (record.levelname, getattr(record, "boundary", None)) == ("ERROR", TINY.boundary.text)
    assert "oak" not in caplog.text
    encoded = reuse.complete(reuse.find(TEXT, TINY.boundary), TINY, 10**6)
    assert (encoded.tokens, encoded.reused) == (RIGHT.tokens, 0)
    assert cache.statistics().segments == 0


async def test_a_check_leaves_its_thread_to_requests(autojump_clock: MockClock) -> None:
    async def busy(function: Callable[[], T], /, *, owner: str, size: int) -> T:
        raise Overloaded("512 long texts wait to be read")

    checks = Checks(cache := new_cache(), busy)
    checks.check.sample(TINY, TEXT, WRONG)
    await checks.tasks[0]()
    assert cache.statistics().mismatches == 0
