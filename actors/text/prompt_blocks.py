"""The hashes of prompts, by which a router finds workers with the same prefix in their caches.

A prompt is hashed once, before it is routed, and a long one in a thread: the router then decides in one turn. Behind
an image or a video an engine hashes its content, so only the tokens before the first one are hashed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import trio
from attrs import evolve

from actors.kit.offload import RunWork
from protocol.block_hashes import block_hashes_after, root_digest
from protocol.messages.generation import Generate, PromptBlocks, RoutingHints
from protocol.messages.media import MediaInfo, Modality
from protocol.token_ids import TokenIds


async def with_blocks(
    generations: Sequence[Sequence[Generate]],
    kept: Sequence[tuple[PromptBlocks, ...]],
    page_sizes: Sequence[int],
    media: MediaInfo | None,
    run: RunWork,
) -> list[list[Generate]]:
    """Return generations with the hashes of their prompts; those of one list have the same prompt.

    The hashes of some prompts were `kept` with their ids; for another prompt there are none.

    One that wants the log probabilities of its prompt gets none: an engine computes that whole, so any other engine is
    as good as the one that has the prompt in its cache.
    """
    await trio.lowlevel.checkpoint()
    hashed = list[list[Generate]]()
    for choices, given in zip(generations, kept, strict=True):
        first = choices[0]
        if first.prompt_logprobs and not choices[1:]:
            hashed.append([first])
            continue
        blocks = given or await _hashed(first, page_sizes, media, run)
        hints = evolve(first.hints or RoutingHints(), blocks=blocks)
        hashed.append([choice if choice.prompt_logprobs else evolve(choice, hints=hints) for choice in choices])
    return hashed


async def _hashed(
    request: Generate, page_sizes: Sequence[int], media: MediaInfo | None, run: RunWork
) -> tuple[PromptBlocks, ...]:
    tokens = request.tokens[: _text_tokens(request, media)]
    return await run(len(tokens) * len(page_sizes), partial(_blocks, tokens, page_sizes, request.cache_namespace))


def _blocks(tokens: TokenIds, page_sizes: Sequence[int], cache_salt: str | None) -> tuple[PromptBlocks, ...]:
    root = root_digest(cache_salt)
    return tuple(PromptBlocks(size, *block_hashes_after(root, tokens, size)) for size in page_sizes)


def _text_tokens(request: Generate, media: MediaInfo | None) -> int:
    """Return the number of tokens before the first image or video."""
    if not request.media or media is None:
        return len(request.tokens)
    first = len(request.tokens)
    for placeholder in map(media.placeholder, Modality):
        if placeholder is not None:
            with suppress(ValueError):
                first = request.tokens.index(placeholder, 0, first)
    return first
