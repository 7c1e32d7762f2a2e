"""A model that takes images and videos, by the tiny model's tokenizer, and a media actor that needs neither."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from attrs import Factory, define, evolve
from tokenizers import Tokenizer

from actors.kit.calls import Answer
from actors.media.layout import PixelLimits, VisionLayout
from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate
from actors.text.encoders import ByTokenizers
from actors.text.model import TextModel
from protocol.errors import RequestError
from protocol.messages.media import Media, MediaForm, MediaInfo, MediaItem, MediaPrepared, Modality, PrepareMedia
from protocol.messages.text import Role, Turn
from protocol.tensors import Dtype, Tensor
from tests.rig.gateway import INFO, TINY

TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}
{%- else -%}{{- '<|' + part['type'] + '_pad|>' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
WIDTH = 4  # elements of an embedding


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_str(TINY.tokenizer.to_str())
    tokenizer.add_special_tokens(["<|image_pad|>", "<|video_pad|>"])
    return tokenizer


def _template() -> ConversationTemplate:
    return ConversationTemplate(compile_template(TEMPLATE, lambda form: form))


_TOKENIZER = _tokenizer()
IMAGE, VIDEO = _TOKENIZER.encode("<|image_pad|><|video_pad|>").ids
PIXELS = PixelLimits(4 * 28**2, 256 * 28**2)
LAYOUT = VisionLayout(14, 2, 2, PIXELS, PIXELS, IMAGE, VIDEO)
SEEING: TextModel = evolve(
    TINY, tokenizer=_TOKENIZER, encoder=ByTokenizers(_TOKENIZER), template=_template(), vision=LAYOUT
)
MEDIA_INFO = MediaInfo(MediaForm.EMBEDDINGS, WIDTH, Dtype.FLOAT32, 2, IMAGE, VIDEO)
SEEING_INFO = evolve(INFO, media=MEDIA_INFO, vocabulary_size=_TOKENIZER.get_vocab_size())


def image(name: str, tokens: int = 4) -> Media:
    """Return an image whose URL says how many tokens it makes."""
    return Media(Modality.IMAGE, f"https://pictures.example/{name}?tokens={tokens}", param=f"image {name}")


def video(name: str, tokens: int = 6) -> Media:
    """Return a video whose URL says how many tokens it makes."""
    return Media(Modality.VIDEO, f"https://pictures.example/{name}?tokens={tokens}", param=f"video {name}")


def seeing(*parts: str | Media) -> Turn:
    """Return a turn of a user, of texts and media."""
    return Turn(Role.USER, parts)


def pixels_of(media: Media) -> MediaItem:
    """Return what is prepared of an image or a video of `image` or `video`."""
    digest = hashlib.sha256(media.url.encode()).hexdigest()
    tokens = int(media.url.rpartition("=")[2])
    data = Tensor(Dtype.UINT8, (1, 1, tokens, 3), memoryview(bytes(3 * tokens)))
    return MediaItem(media.modality, digest, (1, 2, 2 * tokens), tokens, MediaForm.PIXELS, data)


def embedded(item: MediaItem) -> MediaItem:
    """Return an item with embeddings that depend on its digest."""
    row = hashlib.sha256(item.digest.encode()).digest()[: 4 * WIDTH]
    data = Tensor(Dtype.FLOAT32, (item.tokens, WIDTH), memoryview(row * item.tokens))
    return evolve(item, form=MediaForm.EMBEDDINGS, data=data)


@define(eq=False)
class FakeMedia:
    """A media actor that prepares whatever it is asked for, and counts what it holds."""

    takes_s: float = 0.0
    error: RequestError | None = None
    asked: list[PrepareMedia] = Factory(list)
    held: int = 0

    def prepared(self, media: Media) -> MediaItem:
        """Return what is prepared of an image or a video."""
        return pixels_of(media)

    @asynccontextmanager
    async def ask(self, request: PrepareMedia, credit: int) -> AsyncIterator[Answer[MediaPrepared, None]]:
        assert credit >= 1
        self.asked.append(request)
        answer: Answer[MediaPrepared, None] = Answer(credit)
        await trio.sleep(self.takes_s)
        if self.error is not None:
            answer.fail(self.error)
        else:
            answer.put(MediaPrepared(tuple(map(self.prepared, request.media))))
        self.held += 1
        try:
            yield answer
        finally:
            self.held -= 1


def counts(tokens: Sequence[int]) -> tuple[int, int]:
    """Return how many placeholders of images and of videos there are among token ids."""
    return tokens.count(IMAGE), tokens.count(VIDEO)
