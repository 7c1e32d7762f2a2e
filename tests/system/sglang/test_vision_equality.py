"""The tokens of an engine about pictures and videos are those of SGLang itself, which is given the files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from random import Random

import pytest
from attrs import evolve, frozen

from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.token_ids import TokenIds
from tests.contracts import encoder as encoders
from tests.contracts.engine import complete, new_id
from tests.contracts.submission import submitted
from tests.rig import sglang_alone
from tests.rig.pictured_items import PLACES, SeeingModel, png, seeing_model
from tests.rig.pictures import video
from tests.rig.random_vision_models import random_vision_model
from tests.system.sglang.conftest import EACH_FAMILY, MakeEncoder, MakeEngine

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TOKENS = 24
PROMPTS, VIDEOS = 12, 4
SIZES = ((112, 84), (56, 56), (200, 140), (300, 50), (112, 84), (640, 480), (90, 260))
SGLANGS_SECONDS = 2 / 24  # between two steps of any video: SGLang gives transformers no frame rate, which assumes 24


@frozen
class Prompt:
    """A prompt for SGLang, and for an engine of ours."""

    case: sglang_alone.Case
    tokens: TokenIds
    items: tuple[MediaItem, ...]


def prompts(model: SeeingModel) -> list[Prompt]:
    """Return prompts of one to three pictures, the last of which have a video before or behind them, too."""
    made = []
    for seed in range(PROMPTS + VIDEOS):
        files = [png(10 * seed + place, *SIZES[(seed + place) % len(SIZES)]) for place in range(1 + seed % 3)]
        items = [model.image(data) for data in files]
        texts = [f"a picture {PLACES[Modality.IMAGE]} and "] * len(files)
        images = tuple(f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files)
        videos: tuple[str, ...] = ()
        if seed >= PROMPTS:
            shown, place = video(Random(seed)), len(files) * (seed % 2)
            items.insert(place, model.video(shown.data, SGLANGS_SECONDS))
            texts.insert(place, f"a video {PLACES[Modality.VIDEO]} and ")
            videos = (shown.url,)
        text = "".join([f"Number {seed}: ", *texts])
        case = sglang_alone.Case(text, images, videos)
        made.append(Prompt(case, model.tokens(text, items), tuple(items)))
    return made


async def answer(engine: Engine, tokens: TokenIds, items: Sequence[MediaItem]) -> list[int]:
    sampling = Sampling(TOKENS, temperature=0.0, ignore_eos=True)
    ids, _ = await complete(engine, Generate(new_id(), tokens, sampling, media=tuple(items)))
    return ids


async def encoded(encoder: Encoder, items: Sequence[MediaItem]) -> list[MediaItem]:
    """Return items with their embeddings, computed together."""
    async with submitted(encoder, encoders.batch(*items)) as batch:
        outcomes = await encoders.result(batch)
    return [
        evolve(item, form=MediaForm.EMBEDDINGS, data=evolve(outcome.data, data=memoryview(bytes(outcome.data.data))))
        for item, outcome in zip(items, outcomes, strict=True)
    ]


@EACH_FAMILY
async def test_an_engine_answers_with_sglangs_tokens_with_its_tower_and_behind_an_encoder(
    family: str, make_engine: MakeEngine, make_encoder: MakeEncoder
) -> None:
    model = seeing_model(random_vision_model(family))
    asked = prompts(model)
    wanted = sglang_alone.answers(model.folder, [prompt.case for prompt in asked], TOKENS)
    assert len(set(map(tuple, wanted))) > len(wanted) // 2, "the answers depend on the pictures"
    async with make_engine(model_path=str(model.folder)) as engine:
        assert engine.info.media_form is MediaForm.PIXELS
        seen = [await answer(engine, prompt.tokens, prompt.items) for prompt in asked]
    async with make_encoder(model_path=str(model.folder)) as encoder:
        made = [await encoded(encoder, prompt.items) for prompt in asked]
    async with make_engine(model_path=str(model.folder), has_tower=False) as engine:
        assert engine.info.media_form is MediaForm.EMBEDDINGS
        told = [await answer(engine, prompt.tokens, items) for prompt, items in zip(asked, made, strict=True)]
    assert [place for place, tokens in enumerate(wanted) if seen[place] != tokens] == []
    assert [place for place, tokens in enumerate(wanted) if told[place] != tokens] == []
