"""The input of requests with images: no handle stays unopened, whoever leaves, and whatever is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from attrs import evolve
from torch.multiprocessing import set_sharing_strategy

from actors.engines.host.torch_tensors import as_message
from actors.engines.model_files import read_files
from actors.engines.trtllm.host.image_input import ImageInput, SharedTensorList
from actors.engines.trtllm.images import Outline, media_info
from actors.media.model_files import vision_layout
from protocol.errors import EngineRefused, InternalError
from protocol.messages.engine import HandOff
from protocol.messages.generation import Generate, Sampling
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.token_ids import TokenIds
from tests.rig.fake_tensorrt_llm.tensorrt_llm import LLM, SamplingParams
from tests.rig.fake_tensorrt_llm.tensorrt_llm._faults import Fault
from tests.rig.fake_tensorrt_llm.tensorrt_llm._torch.shared_tensor import SharedTensorContainer, held
from tests.rig.fake_tensorrt_llm.tensorrt_llm._types import DisaggregatedParams, PreprocessedInputs
from tests.rig.trtllm_engines import image_model

NAMES = SimpleNamespace(shared_tensors=SharedTensorContainer, disaggregated_params=DisaggregatedParams)
ROWS, WIDTH = 8, 128
ITEM = MediaItem(
    Modality.IMAGE, "ab" * 32, (1, 4, 8), ROWS, MediaForm.EMBEDDINGS, as_message(torch.zeros(ROWS, WIDTH).bfloat16())
)
PIXELS = evolve(ITEM, form=MediaForm.PIXELS, data=as_message(torch.zeros(1, 56, 112, 3, dtype=torch.uint8)))
GIVEN: dict[str, object] = {"inputs": [], "sampling_params": SamplingParams(end_id=-1), "streaming": True}


class Watched(LLM):
    """Makes its inputs once it is let, and then as a test says."""

    begun: threading.Event
    let: threading.Event
    done: threading.Event
    made: list[int] | None = None

    def preprocess(self, inputs: Mapping[str, Any], *given: Any, **named: Any) -> PreprocessedInputs:
        self.begun.set()
        assert self.let.wait(10)
        preprocessed = super().preprocess(inputs, *given, **named)
        if self.made is not None:
            preprocessed.prompt_token_ids = self.made
        self.done.set()
        return preprocessed


@pytest.fixture
def llm(tmp_path: Path) -> Watched:
    made = Watched(image_model(tmp_path, "qwen2_5_vl"))
    made.begun, made.let, made.done = threading.Event(), threading.Event(), threading.Event()
    made.let.set()
    return made


def image_input(llm: Watched, hand_off: HandOff = HandOff.NONE, form: MediaForm = MediaForm.EMBEDDINGS) -> ImageInput:
    files = read_files(Path(llm.args["model"]))
    layout = vision_layout(files)
    assert layout is not None
    assert layout.image_token is not None
    media = media_info(files, layout.image_token, layout.merge, form)
    info = SimpleNamespace(media=media, media_form=media.form, hand_off=hand_off)
    return ImageInput(cast("Any", llm), cast("Any", NAMES), cast("Any", info), Outline.of(files))


def request(*tokens: int, images: int = 1, item: MediaItem = ITEM) -> Generate:
    ids = [*tokens, *[3, *[6] * ROWS, 4] * images]
    return Generate("", TokenIds.of(ids), Sampling(1), media=(item,) * images)


async def asked(llm: Watched, wanted: Generate) -> tuple[dict[str, object], SharedTensorList]:
    form = wanted.media[0].form if wanted.media else MediaForm.EMBEDDINGS
    return await image_input(llm, form=form).arguments(wanted, GIVEN)


def test_an_input_has_the_prompts_own_tokens_and_its_handles(llm: Watched) -> None:
    before = held()
    arguments, shared = asyncio.run(asked(llm, request(300, 301, 9)))
    made, handed = arguments["inputs"], arguments["disaggregated_params"]
    assert isinstance(made, PreprocessedInputs)
    assert isinstance(handed, DisaggregatedParams)
    assert made.prompt_token_ids == [300, 301, 9, 3, *[6] * ROWS, 4], "which no text has"
    assert handed.request_type == "context_and_generation"
    assert handed.multimodal_hashes == [[0xABABABAB - 2**32] * 8]
    assert held() - before == 3, "the embeddings, the positions, and the distance of the next one"
    shared.open_all()
    assert held() == before


def test_the_images_of_a_leg_are_kept_apart_by_its_cache_salt(llm: Watched) -> None:
    """A decode has no hashes of them, and its tokens are the same for all images."""

    def salt(digest: str, own: str | None, hand_off: HandOff = HandOff.SEQUENTIAL) -> object:
        wanted = evolve(request(9), media=(evolve(ITEM, digest=digest * 32),))
        asking = image_input(llm, hand_off).arguments(wanted, GIVEN if own is None else {**GIVEN, "cache_salt": own})
        arguments, shared = asyncio.run(asking)
        shared.open_all()
        return arguments.get("cache_salt")

    cases = [("ab", None), ("cd", None), ("ab", ""), ("ab", "tenant"), ("cd", "tenant")]
    assert len({salt(*case) for case in cases} | {None}) == len(cases) + 1
    assert salt("ab", "tenant") == salt("ab", "tenant")
    assert salt("ab", "tenant", HandOff.NONE) == "tenant", "TensorRT-LLM has hashes of its own"


def test_images_that_cannot_be_hashed_are_kept_apart_by_their_cache_salt(
    llm: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM hashes no image any more once it has failed to hash one, and goes on."""

    def salt(item: MediaItem) -> object:
        arguments, shared = asyncio.run(asked(llm, request(9, item=item)))
        shared.open_all()
        return arguments.get("cache_salt")

    assert salt(PIXELS) is None
    monkeypatch.setenv("ESPALIER_FAKE_TRTLLM_FAULT", Fault.UNHASHED.name)
    assert salt(PIXELS) == salt(PIXELS) != salt(evolve(PIXELS, digest="cd" * 32))
    assert salt(PIXELS) is not None


def test_a_failure_with_images_is_one_of_their_request(llm: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    monkeypatch.setenv("ESPALIER_FAKE_TRTLLM_FAULT", Fault.IMAGES_FAIL.name)
    for item in (PIXELS, ITEM):
        with pytest.raises(InternalError, match="failed with the images: RuntimeError"):
            asyncio.run(asked(llm, request(9, item=item)))
    assert held() == before


def test_a_text_has_positions_alone(llm: Watched) -> None:
    before = held()
    arguments, shared = asyncio.run(asked(llm, request(7, 8, images=0)))
    assert arguments["inputs"] == GIVEN["inputs"]
    assert held() - before == 2
    shared.open_all()


@pytest.mark.parametrize("item", [ITEM, PIXELS], ids=["embeddings", "pixels"])
def test_nothing_stays_of_what_is_refused(llm: Watched, item: MediaItem) -> None:
    before, llm.made = held(), [1, 2, 3]
    with pytest.raises(EngineRefused, match="makes 3 tokens"):
        asyncio.run(asked(llm, request(9, item=item)))
    assert held() == before


def test_a_tensor_that_is_open_already_keeps_no_other_one_closed(llm: Watched) -> None:
    before = held()
    arguments, shared = asyncio.run(asked(llm, request(9)))
    handed = arguments["disaggregated_params"]
    assert isinstance(handed, DisaggregatedParams)
    assert handed.mrope_position_ids_handle is not None
    SharedTensorContainer.from_dict(handed.mrope_position_ids_handle).get_local_view()  # the first one of all
    shared.open_all()
    assert held() == before


def test_texts_and_images_are_shared_at_once(llm: Watched) -> None:
    """TensorRT-LLM changes the way of sharing of the whole process for each tensor, and back."""
    before = held()

    async def ask() -> None:
        maker = image_input(llm, form=MediaForm.PIXELS)
        many = [maker.arguments(request(number, item=PIXELS), GIVEN) for number in range(300, 320)]
        asking = [asyncio.create_task(each) for each in many]
        for _ in range(40):
            _, shared = await maker.arguments(request(7, images=0), GIVEN)
            shared.open_all()
            await asyncio.sleep(0)
        for _, shared in await asyncio.gather(*asking):
            shared.open_all()

    set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]  # torch's own default here
    asyncio.run(ask())
    assert held() == before


@pytest.mark.parametrize("item", [ITEM, PIXELS], ids=["embeddings", "pixels"])
@pytest.mark.parametrize("made", [None, [1, 2, 3]])
def test_nothing_stays_of_a_request_that_is_left_meanwhile(
    llm: Watched, made: list[int] | None, item: MediaItem
) -> None:
    before, llm.made = held(), made
    llm.let.clear()

    async def leave() -> None:
        asking = asyncio.create_task(asked(llm, request(9, item=item)))
        await asyncio.to_thread(llm.begun.wait, 10)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert held() - before == (3 if item is ITEM else 0), "a thread still computes with them"
        llm.let.set()
        async with asyncio.timeout(10):
            while not llm.done.is_set() or held() != before:  # noqa: ASYNC110  # a thread makes them
                await asyncio.sleep(0.001)

    asyncio.run(leave())
