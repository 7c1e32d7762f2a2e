"""The hashes of prompts that travel with their generations."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, TypeVar

from attrs import evolve
from trio.testing import MockClock

from actors.kit.offload import OFFLOAD_SIZE_MIN, Offload, run_inline
from actors.text.prompt_blocks import with_blocks
from protocol.block_hashes import block_hashes
from protocol.messages.generation import Generate, PromptBlocks, RoutingHints, Sampling
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.token_ids import TokenIds
from tests.rig.vision import MEDIA_INFO

T = TypeVar("T")
TOKENS = list(range(40))


def generation(tokens: list[int] = TOKENS, **fields: Any) -> Generate:
    return evolve(Generate("0" * 32, TokenIds.of(tokens), Sampling(3)), **fields)


async def test_choices_of_a_prompt_share_its_hashes(autojump_clock: MockClock) -> None:
    hints = RoutingHints("session", ttft_target_ms=5.0)
    hashed = await with_blocks(
        [[generation(hints=hints), generation(hints=hints)], [generation(TOKENS[:20])]], [(), ()], (8, 16), None, WORK
    )
    first, second = hashed[0]
    assert first.hints is not None
    assert first.hints is second.hints
    assert (first.hints.session, first.hints.ttft_target_ms) == ("session", 5.0)
    assert [(each.page_size, tuple(each.hashes)) for each in first.hints.blocks] == [
        (size, block_hashes(TOKENS, size)) for size in (8, 16)
    ]
    assert hashed[1][0].hints is not None
    assert [len(each.hashes) for each in hashed[1][0].hints.blocks] == [2, 1]


async def test_known_hashes_are_not_computed_again(autojump_clock: MockClock) -> None:
    known = (PromptBlocks(8, array("q", [1, 2]), b"digest"),)
    hashed = await with_blocks([[generation()], [generation(TOKENS[:8])]], [known, ()], (8,), None, WORK)
    (first,), (second,) = hashed
    assert first.hints is not None
    assert second.hints is not None
    assert first.hints.blocks is known
    assert list(second.hints.blocks[0].hashes) == list(block_hashes(TOKENS[:8], 8))


async def test_the_salt_is_part_of_the_hashes(autojump_clock: MockClock) -> None:
    ((salted,),) = await with_blocks([[generation(cache_salt="tenant")]], [()], (16,), None, WORK)
    assert salted.hints is not None
    assert tuple(salted.hints.blocks[0].hashes) == block_hashes(TOKENS, 16, "tenant")


async def test_only_what_is_before_the_first_image_is_hashed(autojump_clock: MockClock) -> None:
    info = MEDIA_INFO
    assert info.image_token is not None
    tokens = [1000 + number for number in range(20)]
    prompt = [*tokens, info.image_token, *tokens]
    ((seeing,),) = await with_blocks([[generation(prompt, media=(ITEM,))]], [()], (8,), info, WORK)
    ((blind,),) = await with_blocks([[generation(prompt)]], [()], (8,), info, WORK)
    assert seeing.hints is not None
    assert blind.hints is not None
    assert tuple(seeing.hints.blocks[0].hashes) == block_hashes(tokens, 8)
    assert len(blind.hints.blocks[0].hashes) == 5


async def test_a_long_prompt_is_hashed_in_a_thread(autojump_clock: MockClock) -> None:
    sizes: list[int] = []

    async def run(function: Callable[[], T], /, *, owner: str, size: int) -> T:
        sizes.append(size)
        return await run_inline(function, owner=owner, size=size)

    await with_blocks([[generation([1] * (OFFLOAD_SIZE_MIN - 1))]], [()], (16,), None, Offload(run, "me").run)
    assert sizes == []
    await with_blocks([[generation([1] * OFFLOAD_SIZE_MIN)]], [()], (16,), None, Offload(run, "me").run)
    assert sizes == [OFFLOAD_SIZE_MIN]


WORK = Offload(run_inline, "me").run
ITEM = MediaItem(Modality.IMAGE, "0" * 64, (1, 2, 2), 1, MediaForm.PLACES)


async def test_a_prompt_that_is_computed_whole_goes_anywhere_and_its_further_choices_behind_it(
    autojump_clock: MockClock,
) -> None:
    first, second = (generation(logprobs=1, prompt_logprobs=whole) for whole in (True, False))
    [[alone], [leading, behind]] = await with_blocks([[first], [first, second]], [(), ()], (4,), None, WORK)
    assert (alone, leading) == (first, first)
    assert behind.hints is not None
    assert behind.hints.blocks
