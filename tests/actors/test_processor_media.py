"""The processor with images and videos: prepared, placed, encoded, asked for, and let go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakSet

import pytest
import trio
from attrs import Factory, define, evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.offload import run_inline
from actors.media.preparation import Vision, embeddings_budget
from actors.processor import processor
from actors.text.limits import PromptLimits
from actors.text.model import TextModel
from protocol.errors import BadRequest, ContextTooLong, RequestError, TooLarge, Unsupported
from protocol.messages.media import Media, MediaForm, MediaItem
from protocol.messages.text import Accepted, Respond, Role, Turn
from protocol.tenants import tenant_salt
from protocol.tensors import BYTES, Dtype, Tensor
from tests.rig.calls import AnyAddress, mailbox
from tests.rig.gateway import TINY, Worker
from tests.rig.vision import (
    IMAGE,
    MEDIA_INFO,
    SEEING,
    SEEING_INFO,
    WIDTH,
    FakeMedia,
    counts,
    embedded,
    image,
    pixels_of,
    seeing,
    video,
)
from tests.rig.watched_memory import Watched, uncollected, watched

LIMITS = PromptLimits(SEEING_INFO, 200, 200)


async def encode(_: Respond, items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    await trio.sleep(1)
    return tuple(map(embedded, items))


def respond(*turns: Turn, **fields: Any) -> Respond:
    return Respond("a" * 32, turns, params={"turns": "messages"}, **fields)


@asynccontextmanager
async def running(
    worker: Worker,
    media: FakeMedia | None = None,
    encode: Callable[..., Any] = encode,
    model: TextModel = SEEING,
    limits: PromptLimits = LIMITS,
    vision: Vision | None = None,
) -> AsyncIterator[AnyAddress]:
    address, inbox = mailbox(4)
    vision = Vision("tiny", media, encode) if vision is None and media is not None else vision
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: processor(
                inbox, model, worker, lambda: limits, run_inline, 4, vision=vision, task_status=task_status
            )
        )
        yield address
        nursery.cancel_scope.cancel()


async def ask(address: AnyAddress, request: Respond) -> list[Any]:
    async with address.ask(request, 10_000) as answer:
        replies = [reply async for reply in answer]
        await answer.result()
        return replies


async def refusal(address: AnyAddress, request: Respond) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await ask(address, request)
    return caught.value


async def test_an_engine_gets_each_item_with_its_embeddings_and_a_place_for_each_of_its_tokens(
    autojump_clock: MockClock,
) -> None:
    worker, media = Worker(), FakeMedia()
    parts = image("a", 3), video("b", 5), image("c", 2)
    async with running(worker, media) as address:
        replies = await ask(address, respond(seeing("First ", parts[0], " then ", *parts[1:], "?")))
    (asked,) = worker.asked
    assert counts(asked.tokens) == (3 + 2, 5)
    assert asked.media == tuple(embedded(pixels_of(part)) for part in parts)
    assert replies[0] == Accepted(len(asked.tokens))
    assert (media.held, media.asked[0].model, media.asked[0].media) == (0, "tiny", parts)


async def test_an_engine_that_computes_with_pixels_has_them_until_the_answer_is_whole(
    autojump_clock: MockClock,
) -> None:
    worker, media = Worker(), FakeMedia()
    limits = evolve(LIMITS, info=evolve(SEEING_INFO, media=evolve(MEDIA_INFO, form=MediaForm.PIXELS)))
    async with running(worker, media, limits=limits) as address, trio.open_nursery() as nursery:
        nursery.start_soon(ask, address, respond(seeing(image("a"), "n=3 s=1")))
        await worker.began.wait()
        assert media.held == 1
        assert worker.asked[0].media == (pixels_of(image("a")),)
    assert media.held == 0


async def test_all_choices_of_a_request_share_what_was_encoded_once(autojump_clock: MockClock) -> None:
    worker, encoded = Worker(), list[MediaItem]()

    async def count(respond: Respond, items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
        encoded.extend(items)
        return await encode(respond, items)

    async with running(worker, FakeMedia(), count) as address:
        await ask(address, respond(seeing(image("a")), n=3))
    assert len(encoded) == 1
    assert [request.media for request in worker.asked] == [(embedded(pixels_of(image("a"))),)] * 3


async def test_images_are_shared_by_requests_of_one_salt_alone(autojump_clock: MockClock) -> None:
    worker = Worker()
    salts = (None, None, "a", "a", tenant_salt("red", None), tenant_salt("red", "a"), tenant_salt("blue", "a"))
    async with running(worker, FakeMedia()) as address:
        for salt in salts:
            await ask(address, respond(seeing(image("a"), video("b")), cache_salt=salt))
    digests = [tuple(item.digest for item in request.media) for request in worker.asked]
    assert digests[0] == digests[1] == tuple(pixels_of(each).digest for each in (image("a"), video("b")))
    assert digests[2] == digests[3]
    assert len({digest for both in digests for digest in both}) == 2 * len(set(salts))


async def test_turns_that_are_left_out_take_their_images_with_them(autojump_clock: MockClock) -> None:
    worker = Worker()
    turns = (
        Turn(Role.SYSTEM, "Look."),
        seeing(image("old", 150)),
        Turn(Role.ASSISTANT, "Yes."),
        seeing("And ", image("new", 30)),
    )
    async with running(worker, FakeMedia()) as address:
        await ask(address, respond(*turns, truncate=True))
    (asked,) = worker.asked
    assert asked.media == (embedded(pixels_of(image("new", 30))),)
    assert counts(asked.tokens) == (30, 0)


async def test_an_image_with_more_tokens_than_fit_is_refused(autojump_clock: MockClock) -> None:
    async with running(Worker(), media := FakeMedia()) as address:
        error = await refusal(address, respond(seeing(image("a", 500))))
    assert isinstance(error, ContextTooLong)
    assert (error.param, media.held) == ("messages", 0)


@pytest.mark.parametrize("text", ["<|image_pad|>", "a<|video_pad|>b"])
@pytest.mark.parametrize("media", [[], [image("a")]])
async def test_the_name_of_a_placeholder_in_a_text_is_refused(
    text: str, media: list[Any], autojump_clock: MockClock
) -> None:
    worker = Worker()
    async with running(worker, FakeMedia()) as address:
        turn = seeing(*media, text) if media else Turn(Role.USER, text)
        error = await refusal(address, respond(turn))
    assert "place" in error.detail
    assert (error.param, worker.asked) == ("messages", [])


@pytest.mark.parametrize("fields", [{"texts": ("<|image_pad|>",)}, {"token_lists": ((1, IMAGE),)}], ids=str)
async def test_a_prompt_without_turns_has_no_placeholders(fields: dict[str, Any], autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, FakeMedia()) as address:
        error = await refusal(address, respond(**fields))
    assert "the prompt has 1 place for images, and 0 images came with it" in error.detail
    assert worker.asked == []


@pytest.mark.parametrize(
    ("model", "media", "info"),
    [
        (TINY, FakeMedia(), SEEING_INFO),
        (SEEING, None, SEEING_INFO),
        (SEEING, FakeMedia(), evolve(SEEING_INFO, media=None)),
    ],
    ids=["the model's files know no images", "no media actor", "the engine takes none"],
)
async def test_a_model_that_takes_text_alone_refuses_images_by_name(
    model: TextModel, media: FakeMedia | None, info: Any, autojump_clock: MockClock
) -> None:
    worker, limits = Worker(), evolve(LIMITS, info=info)
    async with running(worker, media, model=model, limits=limits) as address:
        error = await refusal(address, respond(seeing("Look: ", image("a"))))
        assert isinstance(error, Unsupported)
        assert (error.detail, error.param) == ("this model takes text, and no images", "image a")
        await ask(address, respond(Turn(Role.USER, "Hello")))
    assert len(worker.asked) == 1


async def test_a_model_that_takes_images_may_take_no_videos(autojump_clock: MockClock) -> None:
    limits = evolve(LIMITS, info=evolve(SEEING_INFO, media=evolve(MEDIA_INFO, video_token=None)))
    async with running(Worker(), FakeMedia(), limits=limits) as address:
        error = await refusal(address, respond(seeing(image("a"), video("b"))))
    assert (error.detail, error.param) == ("this model takes no videos", "video b")


async def test_what_cannot_be_prepared_fails_the_request_as_it_failed(autojump_clock: MockClock) -> None:
    worker = Worker()
    async with running(worker, FakeMedia(error=BadRequest("no such picture", param="image a"))) as address:
        error = await refusal(address, respond(seeing(image("a"))))
    assert (error.detail, error.param, worker.asked) == ("no such picture", "image a", [])


class GivenEmbeddings(FakeMedia):
    """A media actor whose items are the embeddings of a client, `dtype` and `width` of which may be any."""

    dtype, width = Dtype.FLOAT32, WIDTH

    def prepared(self, media: Media) -> MediaItem:
        item = super().prepared(media)
        size = item.tokens * self.width * BYTES[self.dtype]
        data = Tensor(self.dtype, (item.tokens, self.width), memoryview(bytes(size)))
        return evolve(item, form=MediaForm.EMBEDDINGS, data=data)


@pytest.mark.parametrize(
    ("dtype", "width", "form", "sentence"),
    [
        (Dtype.FLOAT32, 500_000, MediaForm.EMBEDDINGS, "are 4 x 500000 float32, where this model takes 4 x 4 float32"),
        (Dtype.FLOAT16, WIDTH, MediaForm.EMBEDDINGS, "are 4 x 4 float16, where this model takes 4 x 4 float32"),
        (Dtype.FLOAT32, WIDTH, MediaForm.PIXELS, "this model computes with pixels, and takes no embeddings"),
    ],
    ids=["of another width", "of another type", "where the engines take pixels"],
)
async def test_embeddings_of_a_client_that_the_model_does_not_take_are_refused_before_they_are_kept(
    dtype: Dtype, width: int, form: MediaForm, sentence: str, autojump_clock: MockClock
) -> None:
    worker, media = Worker(), GivenEmbeddings()
    media.dtype, media.width = dtype, width
    limits = evolve(LIMITS, info=evolve(SEEING_INFO, media=evolve(MEDIA_INFO, form=form)))
    async with running(worker, media, limits=limits) as address:
        error = await refusal(address, respond(seeing(image("a"))))
    assert isinstance(error, BadRequest)
    assert sentence in error.detail
    assert (error.param, worker.asked, media.held) == ("image a", [], 0)


def budgeted(media: FakeMedia, bytes_max: int) -> Vision:
    return Vision("tiny", media, encode, embeddings_budget(bytes_max))


ROW_BYTES = 4 * WIDTH  # of the embedding of one token


async def test_embeddings_are_counted_until_their_answer_is_whole(autojump_clock: MockClock) -> None:
    worker, media = Worker(), FakeMedia()
    vision = budgeted(media, 10 * ROW_BYTES)
    async with running(worker, vision=vision) as address, trio.open_nursery() as nursery:
        for place in range(2):  # together they do not fit
            nursery.start_soon(ask, address, respond(seeing(image("a", 6), f"n=3 s=1 {place}")))
            await wait_all_tasks_blocked()
        await trio.sleep(2)
        assert (vision.embeddings.taken, worker.running, media.held) == (6 * ROW_BYTES, 1, 1)
        await trio.sleep(3.5)
        assert (len(worker.asked), worker.running) == (2, 1)
    assert vision.embeddings.taken == 0


async def test_more_embeddings_than_may_ever_be_are_refused_with_both_numbers(autojump_clock: MockClock) -> None:
    vision = budgeted(FakeMedia(), 14 * ROW_BYTES)
    async with running(Worker(), vision=vision) as address:
        error = await refusal(address, respond(seeing(image("a", 11))))
    assert isinstance(error, TooLarge)
    assert error.detail == "the embeddings of one request can have 168 of the 224 bytes for all, and these have 176"
    assert (error.param, vision.embeddings.taken) == ("image a", 0)


async def test_a_request_that_leaves_or_fails_gives_its_memory_for_embeddings_back(autojump_clock: MockClock) -> None:
    vision = budgeted(FakeMedia(), 10 * ROW_BYTES)
    async with running(Worker(), vision=vision) as address:
        for after_s in (0.5, 1.5, 2.5):
            with trio.move_on_after(after_s):
                await ask(address, respond(seeing(image("a", 6), "n=9 s=1")))
            await wait_all_tasks_blocked()
            assert vision.embeddings.taken == 0
        await refusal(address, respond(seeing(image("a", 6), "n=9 s=1 fail=1")))
        assert vision.embeddings.taken == 0


@define(eq=False)
class WatchedMedia(FakeMedia):
    """A media actor whose pixels can be watched."""

    alive: WeakSet[Watched] = Factory(WeakSet)

    def prepared(self, media: Media) -> MediaItem:
        item = super().prepared(media)
        return evolve(item, data=watched(item.data, self.alive))


async def test_pixels_are_freed_as_soon_as_they_are_encoded(autojump_clock: MockClock) -> None:
    worker, media = Worker(), WatchedMedia()
    with uncollected():
        async with running(worker, media) as address, trio.open_nursery() as nursery:
            nursery.start_soon(ask, address, respond(seeing(image("a"), image("b"), "n=3 s=1")))
            await trio.sleep(0.5)
            assert len(media.alive) == 2
            await trio.sleep(1)
            assert worker.running == 1
            assert len(media.alive) == 0


@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5], ids=["prepared", "encoded", "answered"])
async def test_pixels_are_freed_when_their_asker_leaves(after_s: float, autojump_clock: MockClock) -> None:
    media = WatchedMedia(takes_s=1)
    with uncollected():
        async with running(Worker(), media) as address:
            with trio.move_on_after(after_s):
                await ask(address, respond(seeing(image("a"), "n=3 s=1")))
            await wait_all_tasks_blocked()
            assert len(media.alive) == 0
