"""Encoder: images and videos to embeddings, in batches over requests, each item once.

It takes a call as soon as it has a slot for it, so that items with cached embeddings are answered at once; the others
wait here and not in the engine, where none could be overtaken (`actors/engines/encoding/queue.py`). A slot is the right
to have one call here with its pixels, and is free when the engine has released its item. Nothing is retried here: the
router asks another encoder.
"""

from __future__ import annotations

import trio

from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.job import EncodeJob
from actors.engines.encoding.limits import EncoderLimits, EncoderObserver
from actors.engines.encoding.port import Encoder
from actors.engines.encoding.queue import EncodeQueue
from actors.engines.media_check import check_pixels
from actors.engines.outcomes import ENDED, log_outcome, report_outcome
from actors.kit.calls import BugCounter, Call
from actors.kit.priority_inbox import PriorityInbox
from actors.media.layout import VisionLayout
from protocol.errors import BadRequest, EngineDied, EngineLost
from protocol.messages.media import Encode, Encoded, MediaItem, Modality

COMPUTED, CACHED, SHARED = "encoded", "cached", "shared"  # how a call got its embeddings


async def encoder(
    inbox: PriorityInbox[Encode, Encoded, Encoded],
    engine: Encoder,
    slots: int,
    limits: EncoderLimits,
    cache: EmbeddingCache | None = None,
    observer: EncoderObserver | None = None,
    layout: VisionLayout | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Encode items for at most `slots` calls at a time; further calls wait in the inbox.

    With the `layout` of the model, the sizes of pixels are compared with the grids of their items. Raises `EngineDied`
    when the engine is lost, `EngineStuck` when it keeps a batch that has ended.
    """
    cache = EmbeddingCache(limits.cache_bytes_max) if cache is None else cache
    observer = observer or EncoderObserver()
    queue = EncodeQueue(engine, limits, cache, observer)
    free, bugs = trio.Semaphore(slots), BugCounter()

    async def answer_one(call: Call[Encode, Encoded, Encoded]) -> None:  # noqa: ASYNC910  # a task of its own
        item, source = call.request.item, COMPUTED
        job: EncodeJob | None = None

        def report(outcome: str, seconds: float) -> None:
            found = source if outcome == ENDED else outcome
            if not observer.ended(call.request, found, trio.current_time() - seconds):
                log_outcome(call, "encoding ended", outcome, seconds)
            observer.request_ended(item.modality, found)

        with call.answering(bugs) as answer, report_outcome(call, report):
            check_pixels(item, queue.media)
            _check_size(item, layout)
            if (cached := queue.cached(item)) is not None:
                source = CACHED
                answer.end(Encoded(cached, cached=True))
            else:
                source = SHARED if queue.is_shared(item) else COMPUTED
                with queue.join(call.request) as job:
                    answer.end(Encoded(await job.embeddings(limits.waiting_s)))
        if job is not None and job.begun.is_set():
            await job.released.wait()
        free.release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_raise_when_lost, engine, queue)
        nursery.start_soon(queue.run)
        task_status.started()
        while True:
            await free.acquire()
            nursery.start_soon(answer_one, await inbox.receive())


async def _raise_when_lost(engine: Encoder, queue: EncodeQueue) -> None:
    """Raise `EngineDied` when the engine is lost, so that calls wait in the inbox for its next life.

    The calls of the running batch fail with `EngineLost` first: their askers count a crash with this item.
    """
    await engine.wait_lost()
    queue.fail_batch(EngineLost("the encoder was lost while it computed a batch with this item"))
    raise EngineDied("the engine is lost")


def _check_size(item: MediaItem, layout: VisionLayout | None) -> None:
    """Raise `BadRequest` if the pixels of an item do not make the grid that it states."""
    if layout is None:
        return
    frames, height, width, _ = item.data.shape
    is_image = item.modality is Modality.IMAGE
    fit = layout.fit_image(height, width) if is_image else layout.fit_video(frames, height, width)
    if fit.grid != item.grid or (is_image and frames != 1):
        pixels = f"{frames} x {height} x {width} pixels"
        raise BadRequest(f"{pixels} make a grid of {fit.grid} patches, and the {item.modality} states {item.grid}")
