"""Placeholders of images and videos in prompts: one for each item from the chat template, then one for each token."""

from __future__ import annotations

from collections.abc import Sequence

from actors.media.layout import VisionLayout
from protocol.errors import BadRequest
from protocol.messages.media import MediaItem, Modality
from protocol.token_ids import TokenIds


def expand(
    tokens: TokenIds, items: Sequence[MediaItem], layout: VisionLayout | None, param: str | None = None
) -> TokenIds:
    """Return token ids with each placeholder repeated, once for each token of its item.

    The k-th placeholder of a modality belongs to the k-th item of that modality. Raises `BadRequest`, about the field
    `param`, unless there are as many placeholders as items; a text may contain the name of a placeholder.
    """
    if layout is None:
        return tokens
    for modality in Modality:
        placeholder = layout.placeholder(modality)
        counts = [item.tokens for item in items if item.modality is modality]
        places = 0 if placeholder is None else tokens.count(placeholder)
        if places != len(counts):
            sent = _counted(len(counts), modality.value)
            sentence = f"the prompt has {_counted(places, 'place')} for {modality}s, and {sent} came with it"
            raise BadRequest(sentence, param=param)
        if counts and placeholder is not None:
            tokens = _expanded(tokens, placeholder, counts)
    return tokens


def _expanded(tokens: TokenIds, placeholder: int, counts: Sequence[int]) -> TokenIds:
    one, parts, before = TokenIds.of([placeholder]), list[TokenIds](), 0
    for count in counts:
        index = tokens.index(placeholder, before)
        parts += tokens[before:index], TokenIds(one.packed * count)
        before = index + 1
    return TokenIds.joined([*parts, tokens[before:]])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
