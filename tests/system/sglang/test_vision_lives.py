"""Images and videos that are wrong, that nobody wants any more, or whose engine dies: they cost their own request alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from math import inf, nan
from struct import pack
from typing import Any

import pytest
import trio
from attrs import evolve

from actors.engines.hosted_encoder import HostedEncoder
from actors.engines.hosted_engine import HostedEngine
from actors.engines.leftover_memory import SHARED_MEMORY, TENSORS
from actors.engines.port import Engine
from protocol.errors import EngineLost, InternalError, RequestError
from protocol.messages.generation import Generate
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor, size_bytes
from protocol.token_ids import TokenIds
from supervisor.supervision.registration import Registration
from tests.contracts import encoder as encoders
from tests.contracts.engine import RELEASED_WITHIN_S, about, at_rest, complete, item, new_id, request, wrong_media
from tests.contracts.submission import submitted
from tests.rig.pictured_items import png, seeing_model
from tests.rig.random_vision_models import random_vision_model
from tests.system.sglang.conftest import (
    STARTED_WITHIN_S,
    KeepEngines,
    MakeEncoder,
    MakeEngine,
    ZygoteProcess,
)
from tests.system.sglang.test_lives import HOST, SCHEDULER, below

pytestmark = pytest.mark.engine

PAUSES_S = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.1)
TRIES = 5  # of each pause
ENDED_WITHIN_S = 60.0


def tensors_left() -> list[str]:
    """Return the names of tensors on their way to schedulers, of whichever host."""
    return [path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(TENSORS)]


# Wrong items -------------------------------------------------------------------------------


def of_a_host_alone(engine: Engine, wanted: Generate) -> Iterator[Generate]:
    """Yield requests that only an engine's process can refuse: it has the pixels, and can compute with numbers."""
    (good,) = wanted.media
    data = good.data.data
    changes: list[dict[str, Any]] = []
    if good.form is MediaForm.EMBEDDINGS:
        for number in (nan, inf, -inf):
            elements = bytearray(data)
            elements[:2] = pack("<f", number)[2:]  # the upper half of a float32 is a bfloat16
            changes.append({"data": evolve(good.data, data=memoryview(elements))})
    elif good.modality is Modality.IMAGE:
        small, frame = Tensor(Dtype.UINT8, (1, 28, 112, 3), data), memoryview(bytes(2 * len(data)))
        changes += [{"data": small}, {"data": Tensor(Dtype.UINT8, (2, *good.data.shape[1:]), frame)}]
        narrow = Tensor(Dtype.UINT8, (1, 1, 300, 3), memoryview(bytes(900)))
        changes.append({"data": narrow})
    else:
        frames, height, width, _ = good.data.shape
        changes.append({"data": Tensor(Dtype.UINT8, (frames, height // 2, width, 3), data[: len(data) // 2])})
        changes.append(
            {"data": Tensor(Dtype.UINT8, (frames + 2, height, width, 3), memoryview(bytes(len(data) * 3 // 2)))}
        )
    for change in changes:
        yield evolve(wanted, id=new_id(), media=(evolve(good, **change),))


async def refused(engine: Engine, wrong: Generate) -> None:
    """Send a request past the checks of the node, and check that the engine's process refuses it."""
    assert isinstance(engine, HostedEngine)
    _, answer = engine.link.open(wrong, wrong.sampling.tokens_max)
    with trio.fail_after(RELEASED_WITHIN_S), pytest.raises(RequestError) as raised:
        await answer.result()
    if all(size_bytes(each.data) == len(each.data.data) for each in wrong.media):  # else it cannot even be sent
        assert not isinstance(raised.value, InternalError | EngineLost), raised.value


@pytest.mark.parametrize(
    ("family", "has_tower"), [("qwen2_vl", True), pytest.param("qwen2_5_vl", False, marks=pytest.mark.nightly)]
)
async def test_what_no_node_would_send_is_refused_by_the_engines_process_and_the_next_answer_is_right(
    family: str, has_tower: bool, make_engine: MakeEngine
) -> None:
    async with make_engine(model_path=str(random_vision_model(family)), has_tower=has_tower) as engine:
        for modality in Modality:
            wanted = about(engine, item(engine, modality))
            expected, _ = await complete(engine, wanted)
            for wrong in [*wrong_media(engine, wanted), *of_a_host_alone(engine, wanted)]:
                await refused(engine, evolve(wrong, id=new_id()))
            if family == "qwen2_5_vl" and modality is Modality.VIDEO:  # whose positions depend on it
                timeless = evolve(wanted.media[0], seconds_per_grid=None)
                await refused(engine, evolve(wanted, id=new_id(), media=(timeless,)))
            assert (await complete(engine, evolve(wanted, id=new_id())))[0] == expected
        longest = request(engine, 2, engine.info.request_tokens_max)
        await refused(
            engine, evolve(longest, tokens=TokenIds.of([*wanted.tokens, *longest.tokens]), media=wanted.media)
        )
        assert (await complete(engine, evolve(wanted, id=new_id())))[0] == expected
        await at_rest(engine)
    assert tensors_left() == []


@pytest.mark.nightly
async def test_a_model_of_text_gets_no_images(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        picture = MediaItem(Modality.IMAGE, "0" * 64, (1, 2, 2), 1, MediaForm.PLACES)
        await refused(engine, evolve(request(engine), media=(picture,)))
        assert engine.info.media is None


@pytest.mark.nightly
async def test_an_answer_with_the_tokens_of_places_in_it_goes_on(make_engine: MakeEngine) -> None:
    """An answer may have any token: after the loss of its engine, its own placeholders are no places of images."""
    async with make_engine(model_path=str(random_vision_model("qwen2_5_vl"))) as engine:
        media = engine.info.media
        assert media is not None
        for wanted in (about(engine, item(engine, Modality.IMAGE), tokens_max=12), request(engine, 12)):
            for said in ([media.image_token], [media.start_token, media.video_token, 9], [7, media.start_token]):
                tokens = [*wanted.tokens, *(token for token in said if token is not None)]
                resumed = evolve(wanted, id=new_id(), tokens=TokenIds.of(tokens), resumed_tokens=len(said))
                ids, finished = await complete(engine, resumed)
                assert (len(ids), finished.usage.prompt_tokens) == (12, len(tokens))


@pytest.mark.nightly
async def test_an_answer_about_a_picture_goes_on_behind_any_of_its_tokens(make_engine: MakeEngine) -> None:
    async with make_engine(model_path=str(random_vision_model("qwen2_vl"))) as engine:
        wanted = about(engine, item(engine, Modality.VIDEO), item(engine, Modality.IMAGE), tokens_max=16)
        whole, _ = await complete(engine, wanted)
        for resumed in (1, 9):
            sampling = evolve(wanted.sampling, tokens_max=16 - resumed)
            tokens = [*wanted.tokens, *whole[:resumed]]
            rest, _ = await complete(
                engine,
                evolve(wanted, id=new_id(), tokens=TokenIds.of(tokens), resumed_tokens=resumed, sampling=sampling),
            )
            assert rest == whole[resumed:]


# Items that nobody wants any more ----------------------------------------------------------


@pytest.mark.parametrize("has_tower", [pytest.param(True, marks=pytest.mark.nightly), False])
async def test_a_request_with_pictures_can_be_left_at_any_moment_and_leaves_nothing(
    has_tower: bool, make_engine: MakeEngine
) -> None:
    async with make_engine(model_path=str(random_vision_model("qwen2_vl")), has_tower=has_tower) as engine:
        items = [item(engine, Modality.VIDEO), item(engine, Modality.IMAGE), item(engine, Modality.VIDEO)]
        wanted = about(engine, *items, tokens_max=400)
        stays = about(engine, *items[:2], tokens_max=8)
        expected, _ = await complete(engine, stays)
        unanswered = 0
        for pause_s in PAUSES_S * TRIES:
            leaving = evolve(wanted, id=new_id())
            generation = engine.submit(leaving)
            await trio.sleep(pause_s)
            engine.abort(leaving.id)
            with trio.fail_after(RELEASED_WITHIN_S):
                await engine.wait_released(leaving.id)
            with pytest.raises(RequestError):
                await generation.result()
            unanswered += generation.credit == leaving.sampling.tokens_max
        assert unanswered >= TRIES, "some left before their first token"
        await at_rest(engine)
        with trio.fail_after(
            RELEASED_WITHIN_S
        ):  # a thread that still makes some for a request that has left removes them
            while tensors_left():  # noqa: ASYNC110  # files have no event
                await trio.sleep(0.01)
        assert (await complete(engine, evolve(stays, id=new_id())))[0] == expected


# Processes that die ------------------------------------------------------------------------


async def test_the_tensors_of_a_host_that_is_killed_are_removed(
    keep_engines: KeepEngines, zygote: ZygoteProcess
) -> None:
    """A scheduler that is stopped takes no tensor, so they are there when the host is killed."""
    registration: Registration[Engine] = Registration()
    others = set(below({zygote.pid}, HOST))
    async with keep_engines() as keep, trio.open_nursery() as nursery:
        ended = trio.Event()

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with pytest.raises(Exception, match="engine tiny ended"):
                await keep(
                    registration,
                    model_path=str(random_vision_model("qwen2_5_vl")),
                    has_tower=False,
                    task_status=task_status,
                )
            ended.set()

        with trio.fail_after(STARTED_WITHIN_S):
            await nursery.start(live)
        engine = registration.current
        assert engine is not None
        [host] = set(below({zygote.pid}, HOST)) - others
        for scheduler in below({host}, SCHEDULER - HOST):
            os.kill(scheduler, signal.SIGSTOP)
        generation = engine.submit(about(engine, item(engine, Modality.IMAGE), item(engine, Modality.VIDEO)))
        with trio.fail_after(RELEASED_WITHIN_S):
            while len(tensors_left()) < 2:  # noqa: ASYNC110  # files have no event
                await trio.sleep(0.01)
        os.kill(host, signal.SIGKILL)
        with trio.fail_after(ENDED_WITHIN_S):
            await ended.wait()
        with pytest.raises(EngineLost):
            await generation.result()
    assert tensors_left() == []


@pytest.mark.nightly
async def test_an_encoder_that_stands_still_is_noticed_and_one_that_computes_is_not(
    zygote: ZygoteProcess, make_encoder: MakeEncoder
) -> None:
    model = seeing_model(random_vision_model("qwen2_vl"))
    picture = model.image(png(1, 1000, 1000))
    others = set(below({zygote.pid}, HOST))
    async with make_encoder(model_path=str(model.folder), batch_max=64) as encoder:
        assert isinstance(encoder, HostedEncoder)
        [host] = set(below({zygote.pid}, HOST)) - others
        batch = encoders.batch(*[picture] * 64)
        async with submitted(encoder, batch) as answer, trio.open_nursery() as nursery:
            silent = trio.Event()

            async def watch() -> None:
                await encoder.wait_silent(1.0)
                silent.set()

            nursery.start_soon(watch)
            await encoders.result(answer)
            assert not silent.is_set(), "it computed"
            os.kill(host, signal.SIGSTOP)
            with trio.fail_after(10.0):
                await silent.wait()
            os.kill(host, signal.SIGCONT)
