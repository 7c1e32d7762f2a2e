"""Images on TensorRT-LLM's kind, in real host processes with the recorded fake as their package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from attrs import evolve

from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.engines.trtllm.handed import HAND_OFF
from protocol.errors import BadRequest, InternalError, StartFailed, Unsupported
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import MediaForm, MediaItem, Modality
from tests.contracts.encoder import Subject as EncoderSubject
from tests.contracts.encoder import check_encoder, encoded
from tests.contracts.engine import check_engine, complete, new_id, slot
from tests.contracts.pair import Pair, check_pair, state_of
from tests.rig.fake_tensorrt_llm.tensorrt_llm._faults import SLOW_S, Fault
from tests.rig.pictured_items import SeeingModel, png, seeing_model
from tests.rig.trtllm_engines import SPEC, image_model, trtllm_encoder, trtllm_engine

pytestmark = pytest.mark.realtime

TEXT = "a <|vision_start|><|image_pad|><|vision_end|> is what?"
TWO = f"{TEXT} and {TEXT}"


@pytest.fixture
def model(tmp_path: Path) -> SeeingModel:
    return seeing_model(image_model(tmp_path, "qwen2_5_vl"))


def item(model: SeeingModel, number: int, modality: Modality = Modality.IMAGE) -> MediaItem:
    """Return an image that is not square."""
    assert modality is Modality.IMAGE
    return model.image(png(number, 168, 84))


def asked(model: SeeingModel, text: str, *items: MediaItem, tokens_max: int = 6) -> Generate:
    return Generate(
        new_id(), model.tokens(text, items), Sampling(tokens_max, temperature=0.0, ignore_eos=True), media=items
    )


@asynccontextmanager
async def encoder_of(model: SeeingModel) -> AsyncIterator[Encoder]:
    spec = evolve(SPEC, model_path=str(model.folder), batch_max=4)
    async with trtllm_encoder(spec) as encoders:
        assert encoders.current is not None
        yield encoders.current


@asynccontextmanager
async def engine_of(model: SeeingModel, folder: Path, leg: Leg = Leg.BOTH, *, has_tower: bool) -> AsyncIterator[Engine]:
    spec = evolve(SPEC, model_path=str(model.folder), leg=leg, has_tower=has_tower)
    async with trtllm_engine(spec, ESPALIER_FAKE_TRTLLM_FOLDER=str(folder)) as engines:
        assert engines.current is not None
        yield engines.current


async def embeddings(encoder: Encoder, *items: MediaItem) -> list[MediaItem]:
    tensors = await encoded(EncoderSubject(encoder, lambda *_: items[0], 0.0), *items)
    return [evolve(one, form=MediaForm.EMBEDDINGS, data=data) for one, data in zip(items, tensors, strict=True)]


async def test_trtllms_encoder_keeps_the_contract(model: SeeingModel) -> None:
    async with encoder_of(model) as encoder:

        @asynccontextmanager
        async def same() -> AsyncIterator[Encoder]:
            yield encoder

        assert encoder.info.media is not None
        assert encoder.info.media.video_token is None
        await check_encoder(same, partial(item, model))


@pytest.mark.parametrize("has_tower", [True, False])
async def test_an_engine_with_images_keeps_the_contract(model: SeeingModel, has_tower: bool, tmp_path: Path) -> None:
    async with engine_of(model, tmp_path, has_tower=has_tower) as engine:

        @asynccontextmanager
        async def same() -> AsyncIterator[Engine]:
            yield engine

        await check_engine(same)


async def test_one_answer_by_pixels_by_embeddings_and_by_a_pair(model: SeeingModel, tmp_path: Path) -> None:
    """The fake's model sees the embeddings, and the positions of every token: those of pixels are the fake's own."""
    async with AsyncExitStack() as stack:
        enter, of = stack.enter_async_context, partial(engine_of, model, tmp_path)
        encoder = await enter(encoder_of(model))
        whole, seeing = await enter(of(has_tower=False)), await enter(of(has_tower=True))
        prefill, decode = [await enter(of(leg, has_tower=False)) for leg in (Leg.PREFILL, Leg.DECODE)]
        answers = []
        for numbers, text in (((1,), TEXT), ((2,), TEXT), ((1, 2), TWO), ((2, 1), TWO)):
            items = [item(model, number) for number in numbers]
            wanted = asked(model, text, *items)
            by_pixels, _ = await complete(seeing, wanted)
            given = evolve(wanted, id=new_id(), media=tuple(await embeddings(encoder, *items)))
            by_embeddings, _ = await complete(whole, given)
            given = evolve(given, id=new_id())
            async with slot(prefill, given) as prompt:
                places = tuple(each.place for each in items)
                by_pair, _ = await complete(decode, evolve(given, media=places, hand_off=await state_of(prompt)))
            assert by_pixels == by_embeddings == by_pair, numbers
            answers.append(tuple(by_pixels))
        assert len({*answers}) == 4, "the answer depends on each image and on their order"


async def test_a_pair_of_a_model_with_images_keeps_the_contract(model: SeeingModel, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        legs = (Leg.PREFILL, Leg.DECODE, Leg.BOTH)
        of = [await stack.enter_async_context(engine_of(model, tmp_path, leg, has_tower=False)) for leg in legs]
        prefill, decode, whole = of

        @asynccontextmanager
        async def same() -> AsyncIterator[Pair]:
            yield Pair(prefill, decode, whole, HAND_OFF)

        await check_pair(same)


async def test_an_engine_is_alive_while_images_alone_are_prepared(model: SeeingModel) -> None:
    spec = evolve(SPEC, model_path=str(model.folder))
    slow = Fault.IMAGES_SLOW.name
    async with trtllm_engine(spec, silent_s=SLOW_S / 3, ESPALIER_FAKE_TRTLLM_FAULT=slow) as engines:
        engine = engines.current
        assert engine is not None
        ids, _ = await complete(engine, asked(model, TEXT, item(model, 1)))
        assert len(ids) == 6


@pytest.mark.parametrize("fault", ["", Fault.UNHASHED.name])
async def test_no_image_is_answered_by_the_cached_prompt_of_another(model: SeeingModel, fault: str) -> None:
    spec = evolve(SPEC, model_path=str(model.folder))
    async with trtllm_engine(spec, ESPALIER_FAKE_TRTLLM_FAULT=fault) as engines:
        engine = engines.current
        assert engine is not None
        answers = [tuple((await complete(engine, asked(model, TEXT, item(model, n))))[0]) for n in (1, 2, 1)]
        assert answers[0] == answers[2] != answers[1]


async def test_images_that_the_engine_fails_with_end_no_other_request(model: SeeingModel) -> None:
    spec = evolve(SPEC, model_path=str(model.folder))
    async with trtllm_engine(spec, ESPALIER_FAKE_TRTLLM_FAULT=Fault.IMAGES_FAIL.name) as engines:
        engine = engines.current
        assert engine is not None
        with pytest.raises(InternalError, match="failed with the images"):
            await complete(engine, asked(model, TEXT, item(model, 1)))
        ids, _ = await complete(engine, asked(model, "a text alone"))
        assert len(ids) == 6


async def test_what_does_not_fit_is_refused_and_the_engine_serves_on(model: SeeingModel, tmp_path: Path) -> None:
    one = item(model, 1)
    async with encoder_of(model) as encoder, engine_of(model, tmp_path, has_tower=False) as engine:
        (given,) = await embeddings(encoder, one)
        good = evolve(asked(model, TEXT, one), media=(given,))
        with pytest.raises(BadRequest, match="given as pixels"):
            await complete(engine, evolve(good, id=new_id(), media=(one,)))
        video = evolve(given, modality=Modality.VIDEO)
        with pytest.raises(Unsupported, match="takes no video"):
            await complete(engine, evolve(good, id=new_id(), media=(video,)))
        ids, _ = await complete(engine, evolve(good, id=new_id()))
        assert len(ids) == 6


async def test_an_engine_that_takes_no_embeddings_does_not_start(tmp_path: Path) -> None:
    older = seeing_model(image_model(tmp_path, "qwen2_vl"))
    async with engine_of(older, tmp_path, has_tower=True) as engine:
        ids, _ = await complete(engine, asked(older, TEXT, item(older, 1)))
        assert len(ids) == 6
    with pytest.raises(BaseException) as failed:
        async with engine_of(older, tmp_path, has_tower=False):
            pass
    assert failed.group_contains(StartFailed, match="takes embeddings for qwen2_5_vl") or isinstance(
        failed.value, StartFailed
    )
